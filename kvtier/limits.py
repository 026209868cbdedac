"""Every ceiling of kvtier in one place. Units are the last word of a name.

What must not live here: defaults that are not ceilings (they are fields of a config class).
"""

from typing import Final

# Identity and keys
NAME_BYTES_MAX: Final = 1024
"""Model ids, revisions, layouts, tenants, scopes, salts, adapter names."""
BLOCK_TOKENS_MAX: Final = 4096
TOKEN_ID_MAX: Final = 2**32 - 1
PROMPT_TOKENS_MAX: Final = 16 * 2**20
EXTRAS_BYTES_MAX: Final = 1 << 16
"""Tagged extras (multimodal ids and the like) of one block."""
ADAPTERS_COUNT_MAX: Final = 4096
"""Adapters in one model card."""
ENCODING_BYTES_MAX: Final = 16 << 20
"""One canonical encoding (core/encoding.py), the largest being a model card."""
ENCODING_DEPTH_MAX: Final = 8
CARD_NAMES_COUNT_MAX: Final = 256
"""Served names and aliases of one model card."""
LAYERS_COUNT_MAX: Final = 4096
HEADS_COUNT_MAX: Final = 4096
HEAD_DIM_MAX: Final = 1 << 16
MULTIMODAL_ITEMS_MAX: Final = 512
"""Multimodal items that overlap one block."""
SHARED_SCOPES_COUNT_MAX: Final = 1 << 16

# Block frames
PAYLOAD_BYTES_MAX: Final = 1 << 30

# Block copies and slots
BATCH_COPIES_MAX: Final = 1 << 16
"""Blocks of one batched copy, gather or scatter."""
COPY_THREADS_MAX: Final = 64
SLOTS_COUNT_MAX: Final = 1 << 27
"""Slots of one allocator."""
# Tiers
TIER_BATCH_BLOCKS_MAX: Final = 4096
"""Blocks of one call to a tier."""
NVME_SEGMENTS_COUNT_MAX: Final = 256
"""Segment files of one NVMe tier, each with three descriptors: larger tiers have larger ones."""
NVME_UNSAVED_BYTES_MAX: Final = 256 << 20
"""Frames written that the index on disk does not know of yet."""
SCOPE_KEYS_COUNT_MAX: Final = 4096
"""Scopes whose blocks are sealed, each with a key of its own."""
NVME_JOBS_MAX: Final = 1024
"""Jobs that wait for one lane of threads of the NVMe tier."""

# Index
HOLDERS_COUNT_MAX: Final = 1 << 16
SHARDS_COUNT_MAX: Final = 64
INDEX_BYTES_MAX: Final = 64 << 30
MATCH_BLOCKS_MAX: Final = 1 << 20
"""Blocks of one match query."""
FOLLOWERS_COUNT_MAX: Final = 64
"""Replicas that follow one index; each may have a long queue."""
WATCHERS_COUNT_MAX: Final = 1024
MATCH_QUERIES_MAX: Final = 1024
"""Queries of one Match call."""
BATCH_BLOCKS_MAX: Final = 1 << 16
"""Block hashes in one event batch."""
BATCH_EVENTS_MAX: Final = 1 << 14
"""Events in one batch."""
COPIES_COUNT_MAX: Final = 2**16 - 1
"""Copies of one block in one (holder, tier, shard)."""

# Event streams
DEAD_EPOCHS_COUNT_MAX: Final = 64
"""Dead epochs remembered per publisher so that a zombie is fenced."""
RING_BATCHES_MAX: Final = 10_000
REPLICAS_COUNT_MAX: Final = 16
"""Index replicas that one publisher feeds."""
PUBLISHER_QUEUE_BLOCKS_MAX: Final = 1 << 22
"""Blocks, and changes, between an engine and its publishing thread."""
ROUTERS_COUNT_MAX: Final = 1024
"""Routers with reservations."""
RESERVATIONS_PER_ROUTER_MAX: Final = 4096
RESERVATIONS_PER_WORKER_MAX: Final = 4096
RESERVED_BLOCKS_MAX: Final = 1 << 22
"""Predicted blocks of all reservations together."""
RESERVED_BLOCKS_PER_ROUTER_MAX: Final = 1 << 20
"""Predicted blocks of all reservations of one router: they take room from what is really held."""
RESERVATION_TTL_MS_MAX: Final = 60_000
LEASE_MS_MAX: Final = 600_000

# Eviction
EVICTION_KEYS_MAX: Final = 1 << 26
"""Keys that one policy tracks."""
RETENTION_RANGES_MAX: Final = 256
"""Token ranges with a priority in one request."""
TRACE_ROW_BYTES_MAX: Final = 16 << 20
"""One line of a request trace."""

# Admission
TENANTS_COUNT_MAX: Final = 1 << 16
"""Tenants whose quotas or queues are remembered at once."""
QUEUED_REQUESTS_MAX: Final = 1 << 17
RUNNING_REQUESTS_MAX: Final = 1 << 17
PRIORITY_CLASSES_COUNT_MAX: Final = 16

# Configuration and credentials
CONFIG_BYTES_MAX: Final = 1 << 20
"""A configuration, token, certificate or secret file."""
TOKENS_COUNT_MAX: Final = 4096
"""Tokens that one service knows."""
TOKEN_BYTES_MAX: Final = 256
"""A bearer token as presented."""
GRANTS_COUNT_MAX: Final = 64
"""Scope or instance patterns of one principal."""
CREDENTIAL_DAYS_MAX: Final = 398
"""Lifetime of an issued certificate or token."""

# gRPC connections; the keepalive of clients and servers is agreed here
GRPC_MESSAGE_BYTES_MAX: Final = 16 << 20
"""One message: a match of MATCH_BLOCKS_MAX hashes fits, anything longer is a stream of chunks."""
GRPC_METADATA_BYTES_MAX: Final = 8 << 10
GRPC_STREAMS_PER_CONNECTION_MAX: Final = 1024
GRPC_CONCURRENT_CALLS_MAX: Final = 8192
GRPC_CONNECTIONS_MAX: Final = 4096
GRPC_HANDSHAKE_MS_MAX: Final = 5_000
GRPC_KEEPALIVE_MS: Final = 2_000
"""A silent connection is pinged this often, in both directions."""
GRPC_KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""A ping waits behind the bytes before it, so this must outlast a full buffer on a slow link and a
process that stands still for a moment."""
GRPC_PING_INTERVAL_MS_MIN: Final = 500
"""Pings more frequent than this end a connection; well under GRPC_KEEPALIVE_MS."""
GRPC_CONNECTION_IDLE_MS_MAX: Final = 300_000
GRPC_CONNECTION_AGE_MS_MAX: Final = 1_800_000
"""A connection ends after this, so that a withdrawn credential does not live on in a stream."""
GRPC_CONNECTION_GRACE_MS_MAX: Final = 30_000
GRPC_CONNECT_MS_MAX: Final = 2_000
"""One attempt to connect."""
GRPC_RECONNECT_MS_MIN: Final = 100
GRPC_RECONNECT_MS_MAX: Final = 5_000

# Telemetry
LOG_QUEUE_LINES_MAX: Final = 8192
"""Lines that wait to be written; more are lost and counted."""
LOG_VALUE_CHARS_MAX: Final = 512
LOG_FIELDS_COUNT_MAX: Final = 32
LOG_TRACE_CHARS_MAX: Final = 8192
METRIC_LABEL_CHARS_MAX: Final = 128
METRIC_LABEL_VALUES_MAX: Final = 1024
"""Values of one open label that live at once."""
METRIC_SERIES_COUNT_MAX: Final = 1 << 14
"""Lines that one metric can make in a scrape."""
METRICS_HEADER_BYTES_MAX: Final = 8192
METRICS_CONNECTIONS_COUNT_MAX: Final = 16
METRICS_REQUEST_MS_MAX: Final = 5000
"""To send a request, and again to take the answer."""
SPANS_QUEUED_COUNT_MAX: Final = 2048
SPAN_EXPORT_MS_MAX: Final = 3000

# Planner
PLANNER_BLOCKS_MAX: Final = 1 << 22
"""Blocks that one store's planner keeps books of."""
PLANNER_TRANSFERS_MAX: Final = 1 << 16
"""Puts, fetches and promotions under way, and as many demotions."""
PLANNER_QUOTAS_MAX: Final = 1024
"""Scopes with a quota, times tiers."""
PLANNER_EVICTIONS_MAX: Final = 1024
"""Blocks that one call of the planner looks at to make room."""
PINS_COUNT_MAX: Final = 4096
PIN_KEYS_MAX: Final = 4096
"""Keys of one pin."""
PIN_TTL_S_MAX: Final = 86_400

# Store
STORE_IN_FLIGHT_BYTES_MAX: Final = 1 << 40
"""Of blocks that are on their way between tiers, in memory of the store."""
STORE_LEASES_MAX: Final = 1 << 16
"""Blocks of one store that are leased through its service at once."""
STORE_RESERVATIONS_MAX: Final = 1 << 14
"""Of clients of other nodes, at once."""
STORE_CHUNK_BYTES_MAX: Final = 1 << 20
"""Payload in one message of a Get or Put stream."""
STORE_CHUNK_BYTES_MIN: Final = 4096
"""The same, but for the last of a stream: ten million chunks would be ten million messages."""
STORE_DEADLINE_MS_MAX: Final = 60_000
"""How long one call may wait for blocks."""
STORE_STREAM_IDLE_MS_MAX: Final = 5_000
"""Silence of a client that is sending payloads, or of one that takes none."""
STORE_NAMESPACES_MAX: Final = 256
"""Namespaces that one store announces, each as a holder of its own."""
STORE_DIGESTS_MAX: Final = 1 << 20
"""Blocks named by engine digests whose prefix hashes are remembered."""

# Peers: stores of other nodes
LOCATE_STORES_MAX: Final = 8
"""Stores that are told of one block."""
PEERS_COUNT_MAX: Final = 1024
"""Other stores that one store knows at once; the ones not used longest are forgotten."""
PEER_ABSENT_BLOCKS_MAX: Final = 1 << 16
"""Blocks of which is remembered for a moment that no other store has them, or which has."""
PEER_DROPS_MAX: Final = 1 << 16
"""Drops that are remembered for a while, so that what was dropped does not come back at once."""

# Worker: requests and the OpenAI endpoint
HTTP_CONNECTIONS_MAX: Final = 1 << 16
"""Connections of one endpoint."""
HTTP_HEAD_MS_MAX: Final = 60_000
"""How long a connection may take to say what it wants."""
LOGPROBS_COUNT_MAX: Final = 20
"""Likeliest tokens listed beside each generated one."""
STOP_TOKENS_COUNT_MAX: Final = 1024
STOP_STRINGS_COUNT_MAX: Final = 16
STOP_STRING_CHARS_MAX: Final = 256
LOGIT_BIASES_COUNT_MAX: Final = 1024
COMPLETION_CHOICES_MAX: Final = 128
"""Sequences of one HTTP request: prompts times n."""

# Worker: hot sets
HOT_SET_BLOCKS_MAX: Final = 1 << 16
"""Blocks that one list of a hot set names."""
HOT_SET_BYTES_MAX: Final = 8 << 20
"""All pages of one list, unless one page is longer."""
HOT_SET_NODES_MAX: Final = 1 << 18
"""Blocks of L1 whose uses are counted."""

# Text: tokenizers, chat templates, requests
TOKENIZER_BYTES_MAX: Final = 256 << 20
"""tokenizer.json; the largest public ones have 35 MB."""
MODEL_FILE_BYTES_MAX: Final = 16 << 20
"""Any other file of a model directory that is read as text."""
ADDED_TOKENS_COUNT_MAX: Final = 1 << 15
"""Added tokens of a tokenizer that texts are cut at."""
TEMPLATE_CHARS_MAX: Final = 1 << 20
"""Source of one chat template."""
CHAT_TEMPLATES_COUNT_MAX: Final = 64
"""Named templates of one model."""
TEMPLATE_STEPS_MAX: Final = 1 << 18
"""Calls and loop items of one run of a chat template."""
TEMPLATE_BUILT_CHARS_MAX: Final = 1 << 30
"""Characters of all texts that one run joins on its way to the result."""
TEMPLATE_INDENT_MAX: Final = 64
RENDERED_CHARS_MAX: Final = 32 << 20
"""A rendered chat, and any text to tokenise."""
CHAT_MESSAGES_COUNT_MAX: Final = 1 << 14
JSON_DEPTH_MAX: Final = 64
JSON_COMMAS_COUNT_MAX: Final = 1 << 21
"""Of one request, those in its texts too: parsing more values would hold up everybody else."""
JSON_BRACKETS_COUNT_MAX: Final = 1 << 19
"""Openings of objects and arrays of one request, those in its texts too."""
"""Nesting of a request, and of one message or tool in it."""
SEGMENT_CACHE_BYTES_MAX: Final = 4 << 30
"""Remembered tokens of one model's text segments."""
WORDS_COUNT_MAX: Final = 1 << 16
"""Remembered words of one tokenizer."""
WORD_CHARS_MAX: Final = 64

# OpenAI's protocol
REQUEST_BYTES_MAX: Final = 64 << 20
"""Body of one request; a million tokens as text have about 5 MB."""
SSE_EVENT_BYTES_MAX: Final = 8 << 20
"""One event of a relayed stream."""
PROMPTS_COUNT_MAX: Final = 4096
"""Prompts in one request for completions."""
CHOICES_COUNT_MAX: Final = 128
"""Answers to one prompt."""

# A cluster on one machine
LOCAL_WORKERS_COUNT_MAX: Final = 64
"""Workers that `kvtier up` starts."""
LOCAL_ROUTERS_COUNT_MAX: Final = 16
"""Routers that `kvtier up` starts."""

# Offline batches
BATCH_ROWS_MAX: Final = 1 << 30
"""Rows of one batch; each takes 8 bytes of memory while names are compared, and a bit later."""
BATCH_ROW_BYTES_MAX: Final = 64 << 20
"""One row of the input, and one answer."""
BATCH_WINDOW_MAX: Final = 1 << 14
"""Requests under way at once."""
BATCH_LOOKAHEAD_MAX: Final = 1 << 17
"""Rows that wait for another of their group."""
BATCH_SORT_BYTES_MAX: Final = 64 << 30
BATCH_RUNS_COUNT_MAX: Final = 128
"""Sorted parts that are merged at once."""
BATCH_TRIES_MAX: Final = 8
"""Of one row, each after others were answered since the one before."""
BATCH_PAUSE_MS_MAX: Final = 30_000
"""Before a row is tried again."""

# Foreign engines' events
ENGINE_PAYLOAD_BYTES_MAX: Final = 16 << 20
"""One message of an engine: a step that fills a million tokens of blocks has about 5 MB."""
ENGINE_EVENTS_MAX: Final = 1 << 16
"""Events in one message."""
ENGINE_EVENT_BLOCKS_MAX: Final = 1 << 16
"""Blocks in one event."""
ENGINE_HASH_BYTES_MAX: Final = 64
ENGINE_RESIDENTS_MAX: Final = 1 << 24
"""Copies of blocks that one rank of an engine is followed for."""
ENGINE_DIGESTS_MAX: Final = 1 << 24
"""Engine hashes whose prefix keys are remembered."""
ENGINE_RANKS_MAX: Final = 256
"""Data-parallel ranks behind one bridge."""
ENGINE_HELD_BATCHES_MAX: Final = 1 << 16
"""Live messages that wait for a replay."""
ENGINE_HELD_BYTES_MAX: Final = 256 << 20
"""The same."""
ENGINE_FEED_ROWS_MAX: Final = 4096
"""Slots in one frame of an engine's connector."""
ENGINE_FEED_CLIENTS_MAX: Final = 4
"""Bridges that listen to one connector."""

# What a router asks of workers of whose load nobody tells
LOAD_POLLS_MAX: Final = 16
"""Pages that are read at once."""

# What a router remembers for its dashboard
HISTORY_REQUESTS_COUNT_MAX: Final = 10_000
HISTORY_BASES_COUNT_MAX: Final = 1_000
"""Decisions whose costs are kept."""
HISTORY_ROWS_COUNT_MAX: Final = 1 << 18
"""Rows (workers) of all of them; one is about 120 bytes."""
HISTORY_EVENTS_COUNT_MAX: Final = 1_000
HISTORY_POINTS_COUNT_MAX: Final = 720
"""Points of a chart: an hour at 5 s."""
PAGE_ROWS_COUNT_MAX: Final = 500
"""Rows that one answer of the dashboard's feed has."""
