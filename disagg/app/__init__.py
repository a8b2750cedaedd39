"""The Ray Serve shell: deployments, membership, build. The only package that imports ray.

It decides where processes run; it knows nothing of what is in a request.
"""
