"""The index in one SQLite file, shared by the processes of a machine."""
