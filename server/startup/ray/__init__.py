"""Deployment on a Ray cluster."""
