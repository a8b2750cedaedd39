"""KV import: brings KV from peers, host memory and the store into a worker's cache."""
