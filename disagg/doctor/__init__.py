"""What an operator asks before the first request: can this machine serve, and if not, why not?"""
