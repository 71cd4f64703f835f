"""Worker groups: several processes, the ranks, that train one model together."""
