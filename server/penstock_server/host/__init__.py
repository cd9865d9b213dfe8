"""The machine below a process: its heap, its threads' priorities, its drivers, its log, its cache of folders."""
