// The directory of a shared-memory arena: which block is in which slot. One process writes it, any number read it while it
// is written. Layout, lookup and the seqlock; twin: kvtier/tiers/arena/directory.py, where the layout is described.
// What must not live here: Python, who owns which slot, sockets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvtier::arena {

inline constexpr std::uint32_t abi_version = 3;
inline constexpr std::size_t header_bytes = 4096;
inline constexpr std::size_t entry_bytes = 192;
inline constexpr std::size_t name_bytes = 96;     // the first bytes of a frame's header, its writer id zeroed
inline constexpr std::size_t frame_bytes = 128;   // a frame's header
inline constexpr std::size_t probes_max = 512;    // of one lookup; a table is at most half full, so a few are usual
inline constexpr std::uint64_t entries_count_max = std::uint64_t{1} << 26;
inline constexpr std::uint64_t nowhere = ~std::uint64_t{0};

using FrameHeader = std::array<std::uint64_t, frame_bytes / 8>;
inline constexpr std::size_t writer_word = 3;
inline constexpr std::size_t payload_bytes_word = 12;
inline constexpr std::size_t payload_checksum_word = 13;
inline constexpr std::size_t reserved_word = 14;
inline constexpr std::size_t header_checksum_word = 15;

// Whether a frame header is intact and of that name; says nothing of the payload.
bool is_of_name(const FrameHeader& frame, const std::uint8_t* name);

// The header page of a directory, read once a call and held against the memory there is: whatever it says, no access
// leaves the buffers.
struct Geometry {
  std::uint64_t epoch;
  std::uint64_t entries_count;
  std::uint64_t buckets_count;  // a power of two, at least twice the entries
  std::uint64_t slots_bytes;
  bool is_serving;
};

enum class HeaderFault { none, small, magic, abi, counts };

HeaderFault read_geometry(const std::uint8_t* directory, std::size_t directory_bytes, Geometry& geometry);

// Where a name was found, as of one generation of its entry.
struct Found {
  std::uint64_t entry = nowhere;
  std::uint64_t generation = 0;
  std::uint64_t slot_offset = 0;
  FrameHeader frame{};
};

// What is published: a payload that stands in its slot. Python packs five u64.
struct Block {
  std::uint64_t entry;
  std::uint64_t slot_offset;
  std::uint64_t writer_id;
  std::uint64_t payload_bytes;
  std::uint64_t payload_checksum;
};
static_assert(sizeof(Block) == 40);

enum class ReadStatus : std::uint64_t {
  hit = 0,
  miss = 1,          // not there, or changing: a reader never waits
  not_the_name = 2,  // the entry's frame header is not intact, or of another name: to be classified by the caller
  length = 3,        // not of the length that was asked for
  buffer_short = 4,
  payload = 5,       // the checksum over the private copy is not the header's
};

class Directory {
 public:
  Directory(std::uint8_t* memory, const Geometry& geometry) : memory_(memory), geometry_(geometry) {}

  std::uint64_t hash(const std::uint8_t* name) const;

  // Readers.
  Found find(const std::uint8_t* name) const;
  bool is_unchanged(const Found& found) const;  // to be asked after the slot was read

  // The writer. The entry must be one that is not in use; false where the table has no place within probes_max.
  bool publish(const std::uint8_t* name, const Block& block);
  void remove(std::uint64_t entry, const std::uint8_t* name);
  std::uint64_t generation(std::uint64_t entry) const;

 private:
  std::uint8_t* bucket(std::uint64_t position) const { return memory_ + header_bytes + 8 * position; }
  std::uint8_t* entry_at(std::uint64_t entry) const {
    return memory_ + header_bytes + 8 * geometry_.buckets_count + entry_bytes * entry;
  }
  void close_gap(std::uint64_t position);

  std::uint8_t* memory_;
  Geometry geometry_;
};

}  // namespace kvtier::arena
