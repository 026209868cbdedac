"""The worker's OpenAI endpoint. From below: `errors`, `fields`, `parameters` (bodies to terms),
`texts` (what it needs of a tokenizer), `choices` (tokens to text), `shapes` (JSON of answers),
`metrics`, `health`, `settings`, `app` (routes; `create_app` and `create_runner`).

What must not live here: scheduling, sampling, templates, sockets of gRPC.
"""
