"""What bounds one call: hardware counters, and where its time goes."""
