// Turns SIGBUS under a copy out of a mapped file (the disk failed, or the file was cut) into an answer.
// What must not live here: mapping, copying, Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvtier {

// Runs `work(argument)` on this thread; false where the kernel could not give a page of [begin, begin + size) meanwhile:
// then `work` was left in its middle. So it must own nothing that has to be given back, and take no lock.
//
// The handler is put in place by the first call, and again where somebody has replaced it since (one system call a call to
// see that). Every other SIGBUS goes to whoever was asked before, or ends the process as it did.
bool run_guarded(const std::uint8_t* begin, std::size_t size, void (*work)(void*), void* argument);

}  // namespace kvtier
