"""The whole engine without a server: timings of steps, scores of many texts in batches."""
