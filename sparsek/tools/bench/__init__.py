"""Cases, peers, the run, its records, and the tables and charts made from them."""
