"""Which format a layer should take, from figures that were measured."""
