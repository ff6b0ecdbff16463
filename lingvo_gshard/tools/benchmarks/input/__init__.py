"""gshard-bench input: how fast text becomes batches, and with how much memory."""
