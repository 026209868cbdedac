#include "batch_message.hpp"

namespace kvtier {

namespace {

constexpr std::uint8_t BATCH_TAG = 2 << 3 | 2;  // of PublishRequest; length-delimited
constexpr std::uint8_t SEQ_TAG = 1 << 3 | 0;    // of Batch; varint
constexpr std::uint8_t COLUMN_TAG_FIRST = 2 << 3 | 2;
constexpr std::size_t COLUMNS = 5;
constexpr unsigned LENGTH_BITS_MAX = 32;

class Reader {
 public:
  Reader(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  bool is_at_end() const { return at_ == end_; }

  bool skip(std::uint8_t tag) {
    if (at_ == end_ || *at_ != tag) return false;
    ++at_;
    return true;
  }

  // False where it is cut short or does not fit `bits`.
  bool varint(unsigned bits, std::uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; shift < bits; shift += 7) {
      if (at_ == end_) return false;
      const std::uint8_t byte = *at_++;
      const std::uint64_t part = byte & 0x7F;
      if (bits - shift < 7 && part >> (bits - shift) != 0) return false;
      value |= part << shift;
      if ((byte & 0x80) == 0) return true;
    }
    return false;
  }

  bool column(Column& column) {
    std::uint64_t size = 0;
    if (!varint(LENGTH_BITS_MAX, size) || size > static_cast<std::size_t>(end_ - at_)) return false;
    column = {at_, static_cast<std::size_t>(size)};
    at_ += size;
    return true;
  }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

}  // namespace

bool read_batch_message(const std::uint8_t* data, std::size_t size, BatchMessage& message) {
  Reader outer(data, size);
  Column batch;
  if (!outer.skip(BATCH_TAG) || !outer.column(batch) || !outer.is_at_end()) return false;
  message = {};
  Reader inner(batch.data, batch.size);
  if (inner.skip(SEQ_TAG) && !inner.varint(64, message.seq)) return false;
  Column* const columns[COLUMNS] = {&message.kinds, &message.tiers, &message.lengths, &message.parents,
                                    &message.hashes};
  for (std::size_t i = 0; i < COLUMNS; ++i) {
    const auto tag = static_cast<std::uint8_t>(COLUMN_TAG_FIRST + 8 * i);
    if (inner.skip(tag) && !inner.column(*columns[i])) return false;
  }
  return inner.is_at_end();
}

}  // namespace kvtier
