"""A deployment on Ray Serve: engines as replicas, a router by prefix, and the same HTTP app in front. Needs the extra `ray`."""
