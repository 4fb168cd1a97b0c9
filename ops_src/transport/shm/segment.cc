#include "transport/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/error.h"

namespace kungfu::shm {
namespace {

constexpr uint64_t kMagic = 0x6b756e6766755348;  // "kungfuSH"
constexpr uint32_t kLayoutVersion = 9;
constexpr size_t kPage = 4096;

}  // namespace

Segment::Layout Segment::LayoutFor(uint32_t size, bool control_block) {
  Layout layout{};
  size_t end = RoundUp(sizeof(Header), kPage);
  const auto place = [&end](size_t bytes) {
    const size_t offset = end;
    end = RoundUp(end + bytes, kPage);
    return offset;
  };
  const size_t n = size;
  layout.status = place(n * sizeof(RankStatus));
  layout.total = end;
  if (control_block) return layout;
  layout.channels = place(kChannels * sizeof(ChannelHead));
  layout.mailboxes = place(kChannels * n * 2 * sizeof(Mailbox));
  layout.complaints = place(kChannels * n * sizeof(Complaint));
  layout.staging_words = place((kStagingBuffers + kPinnedBuffers) * n * kStagingWords * sizeof(StagingCounter));
  layout.buffers = place((kStagingBuffers + kPinnedBuffers) * n * kBuffers * kBufferBytes);
  layout.total = end;
  return layout;
}

int Segment::Create(uint32_t size, uint64_t cluster_version, uint32_t cores, bool recovers, bool control_block) {
  const uint32_t most = control_block ? kMaxMembers : kMaxRanks;
  if (size < 1 || size > most) {
    throw Error(KF_INVALID, Text(size, " ranks: ", control_block ? "a job on several hosts" : "a host", " has 1 to ",
                                 most, " ranks"));
  }
  const int fd = memfd_create("kungfu", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw SystemError("memfd_create");
  try {
    const Layout layout = LayoutFor(size, control_block);
    if (ftruncate(fd, static_cast<off_t>(layout.total)) != 0) {
      throw SystemError(Text("allocating ", layout.total, " bytes of shared memory"));
    }
    // After the file is sealed, no process can shrink it. Shrinking it while other processes use it
    // would raise SIGBUS in these processes.
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    const Mapping map(fd, 0, sizeof(Header), /*writable=*/true, "a new segment");
    auto* header = new (map.data()) Header{};
    header->layout_version = kLayoutVersion;
    header->size = size;
    header->cluster_version = cluster_version;
    header->announced = cluster_version;
    header->cores = std::max(1u, cores);
    header->recovers = recovers ? 1 : 0;
    header->is_control_block = control_block ? 1 : 0;
    header->total_bytes = layout.total;
    header->magic = kMagic;
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

Segment::Segment(int fd) {
  const size_t bytes = FileSize(fd, "a segment");
  if (bytes < sizeof(Header))
    throw Error(KF_INTERNAL, Text("a segment has only ", bytes, " bytes, less than its header"));
  base_ = map_.emplace(fd, 0, bytes, /*writable=*/true, "a segment").data();
  const Header& header = this->header();
  const bool ours = header.magic == kMagic && header.layout_version == kLayoutVersion && header.size >= 1 &&
                    header.size <= (header.is_control_block != 0 ? kMaxMembers : kMaxRanks) &&
                    header.total_bytes == bytes && LayoutFor(header.size, header.is_control_block != 0).total == bytes;
  if (!ours) {
    throw Error(KF_INTERNAL, Text("the memory isn't a segment of this version of the runtime (magic ", header.magic,
                                  ", layout ", header.layout_version, ", size ", header.size, ", ", header.total_bytes,
                                  " of ", bytes, " bytes)"));
  }
  size_ = header.size;
  layout_ = LayoutFor(size_, is_control_block());
}

}  // namespace kungfu::shm
