"""Many requests from a file: OpenAI's batch format, for the command, the server and Ray Data."""
