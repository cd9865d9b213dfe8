"""The processes of workers: the fork server, one process per rank, its service and its compute thread."""
