"""Rules, one file each; a package per family lists its own."""
