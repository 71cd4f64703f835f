"""The machine: processes, files, cores, memory. Imports no other part of Quartet but errors and the contract."""
