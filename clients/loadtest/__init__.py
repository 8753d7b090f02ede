"""Load tests of any OpenAI-compatible server: schedules, workloads, measurement, reports. Behind `windlass bench`."""
