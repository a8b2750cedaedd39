"""What a model needs, what a device has, and how long its steps take by that."""
