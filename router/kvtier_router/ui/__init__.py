"""The operator's view of one router process: a page, its feed, and what is watched for both.

Read-only: nothing here changes a route. What must not live here: prompt text, keys, salts; anything
that costs a request time.
"""
