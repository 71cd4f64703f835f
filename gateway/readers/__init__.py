"""Read the files of runs. Contents that are requested repeatedly are cached; large files are read in parts."""
