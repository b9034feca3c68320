"""`shardax demo`: everything that shardax is for, on eight simulated devices. `story.py` tells it."""
