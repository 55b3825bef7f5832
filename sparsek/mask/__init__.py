"""Which blocks of attention exist, and what is masked inside of them."""
