"""Many listeners: streams that share one GPU."""
