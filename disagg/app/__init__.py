"""The Ray Serve application: deployments, membership, autoscaling. The only importer of ray.

It decides where processes run, and knows nothing of requests.
"""
