"""What a switch would take on a cluster that is described in numbers: traffic, contention, seconds, floor."""
