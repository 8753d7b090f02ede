"""Tokenizing, detokenizing and chat templates; what may take long runs in processes that can be killed."""
