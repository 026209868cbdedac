// A numbered batch of events as it stands on the wire: a PublishRequest that holds a Batch and nothing else. Only the
// plain form is read: every field at most once, in the order of its number, nothing unknown. What is not plain may still
// be right, which the general parser decides. What must not live here: Python, what a batch means.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

struct Column {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

struct BatchMessage {
  std::uint64_t seq = 0;
  Column kinds;
  Column tiers;
  Column lengths;
  Column parents;
  Column hashes;
};

// False where the bytes are not plain; columns point into `data`, unaligned, and are not checked against each other.
bool read_batch_message(const std::uint8_t* data, std::size_t size, BatchMessage& message);

}  // namespace kvtier
