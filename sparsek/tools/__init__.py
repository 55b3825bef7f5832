"""What a person runs: the command line, advice, profiles, benchmarks."""
