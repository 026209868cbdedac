"""OpenAI's protocol without HTTP: requests as typed views, error bodies, server-sent events, usage.

What must not live here: HTTP libraries, and which parameters a service implements.
"""
