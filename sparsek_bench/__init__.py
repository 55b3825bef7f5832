"""Measuring: `sparsek bench` and `sparsek profile`, their cases, peers and tables. Nothing in sparsek imports it."""

from sparsek.core import doors

doors.build("benches", "sparsek_bench.benches")
