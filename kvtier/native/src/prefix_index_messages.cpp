// A run of wire messages into the index, without an object between them.
#include <cstring>
#include <stdexcept>

#include "prefix_index.hpp"

namespace kvtier::index {

namespace {

constexpr std::size_t RUN_BLOCKS_MAX = 2048;  // under one lock, unless one message has more: a fraction of a millisecond
constexpr std::size_t U64 = sizeof(std::uint64_t);

std::size_t words(const Column& column) { return (column.size + U64 - 1) / U64; }

// Copies a column to where it is aligned; `at` moves on.
const std::uint64_t* align(const Column& column, std::uint64_t*& at) {
  const std::uint64_t* const start = at;
  if (column.size != 0) std::memcpy(at, column.data, column.size);
  at += words(column);
  return start;
}

}  // namespace

bool PrefixIndex::apply_messages(std::int64_t holder, std::int64_t shard, std::uint64_t seq,
                                 const std::vector<Column>& messages, std::int64_t room_blocks, Run& run, bool wait) {
  std::unique_lock lock(gate_, std::defer_lock);
  if (wait) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return false;
  }
  const std::uint32_t number = check_holder(holder);
  const std::uint32_t part = check_shard(number, shard);
  std::vector<std::uint64_t> aligned;
  std::size_t blocks = 0;
  for (const Column& bytes : messages) {
    BatchMessage message;
    if (blocks >= RUN_BLOCKS_MAX || !read_batch_message(bytes.data, bytes.size, message)) break;
    if (message.seq != seq + run.messages || !apply_message(number, part, message, aligned, run)) break;
    ++run.messages;
    blocks += message.hashes.size / U64;
    if (room_blocks < 0 || run.counts.stored > static_cast<std::uint64_t>(room_blocks)) break;
  }
  return true;
}

// False, and nothing has changed, where the batch would be refused.
bool PrefixIndex::apply_message(std::uint32_t holder, std::uint32_t shard, const BatchMessage& message,
                                std::vector<std::uint64_t>& aligned, Run& run) {
  const std::size_t count = message.kinds.size;
  if (message.lengths.size != count * sizeof(std::uint32_t) || message.parents.size != count * U64 ||
      message.hashes.size % U64 != 0)
    return false;
  for (std::size_t i = 0; i < message.tiers.size; ++i)
    if (message.tiers.data[i] >= TIERS) return false;  // of a clear of everything it is not asked below
  aligned.resize(words(message.lengths) + words(message.parents) + words(message.hashes));
  std::uint64_t* at = aligned.data();
  const auto* const lengths = reinterpret_cast<const std::uint32_t*>(align(message.lengths, at));
  const std::uint64_t* const parents = align(message.parents, at);
  const std::uint64_t* const hashes = align(message.hashes, at);
  const Batch batch{message.kinds.data, message.tiers.data, lengths, parents, count,
                    message.tiers.size, count,              count,   {hashes, message.hashes.size / U64}};
  std::vector<Event> events;
  try {
    events = check_batch(holder, batch);
  } catch (const std::invalid_argument&) {
    return false;
  }
  apply_events(holder, shard, batch, events, run.counts);
  settle(run.counts);
  run.events += count;
  return true;
}

}  // namespace kvtier::index
