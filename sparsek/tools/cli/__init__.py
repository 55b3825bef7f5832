"""The command line. Each module parses, calls, and prints; what it calls lives below."""
