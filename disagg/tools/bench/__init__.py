"""Load tests of any server with OpenAI's API."""
