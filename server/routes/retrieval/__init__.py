"""The endpoints that generate nothing: texts become vectors, scores, an order, or classes."""
