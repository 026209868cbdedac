// Copies out of the page cache by mapping the file: a plain copy, where read() makes the kernel do it (half as fast).
// What must not live here: Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy.hpp"

namespace kvtier {

enum class Residency { any, cached };

// Where bytes of a file go: the first `head_size` as they are, those behind them with their checksum taken.
struct FileCopy {
  int descriptor;
  std::uint64_t offset;
  std::uint8_t* head;
  std::size_t head_size;
  std::uint8_t* body;
  std::size_t body_size;
};

struct FileCopied {
  int error;       // 0, or an errno: EIO where the disk failed or the file ends earlier
  bool is_absent;  // Residency::cached, and the page cache lacks some of it: nothing was copied
  std::uint64_t checksum;  // of the body, as it stands in its destination
};

// Copies, on one thread, out of a mapping that lives as long as the call: so the address space that is taken is what is
// being read, and no mapping outlives its file. Residency::any may wait for the disk. Residency::cached does not, unless the
// kernel takes a page back within the microseconds after it was asked.
FileCopied copy_from_file(const xxh3::Kernel& kernel, const FileCopy& wanted, Residency residency);

// Has the kernel read bytes of a file into its cache, in large pages where it can, and waits for that. Whether it did: false
// where the disk failed, the file ends earlier, or the kernel knows no such request (before Linux 5.14).
bool warm_from_file(int descriptor, std::uint64_t offset, std::size_t size);

}  // namespace kvtier
