// TLS over the connections between hosts, by OpenSSL: what stands between a connection and its socket if it is on.
//
// A connection begins as the launchers' own (control.py): there both ends show their certificates and prove that they
// know the job's secret. It is the same TLS session, never a second one, that is then passed to a mesh: the end that
// carries the data is the one that has proved itself. So OpenSSL never sees a socket. What is to go out lies in memory
// until its owner sends it, and what has come is given to it; a launcher does that by Put and Take, a mesh by WriteSome
// and ReadSome, which are to a connection with TLS what the functions in socket.h are to one in the clear.
//
// Two things differ from a socket, and a mesh minds both (Connection::Holds, HasMore): what WriteSome has taken may
// still lie here, encrypted, until the kernel has room; and bytes that have come may lie here, of which epoll knows
// nothing.
//
// TLS 1.3 alone, so nothing is negotiated anew in between. Without tickets: nothing comes behind the handshake but
// data, and keys that are updated one way, after as many records as are safe under one (RFC 8446, 5.5). The end of a
// connection isn't signed (no close_notify): to a mesh any end is the loss of a host, unless all have come to theirs.
#ifndef KUNGFU_TRANSPORT_TCP_TLS_H_
#define KUNGFU_TRANSPORT_TCP_TLS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/tcp/socket.h"

namespace kungfu::tcp {

// What all of a host's ends have in common: its certificate, and the CA that has to have signed the others'. Immutable.
class TlsContext {
 public:
  // Files in PEM. Throws Error KF_MISSING if there is no OpenSSL, KF_INVALID if a file isn't what it should be.
  TlsContext(const std::string& certificate, const std::string& key, const std::string& ca);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsEnd;
  void* context_;
};

// One end of a connection. WriteSome and ReadSome may be called by two threads at once; all else by one.
class TlsEnd {
 public:
  // `called`: the other end has called this one. `name`: the host name or address that the other's certificate has to
  // be for; empty: whichever the CA has signed. `most_records`: what is written under one key.
  TlsEnd(std::shared_ptr<TlsContext> context, bool called, const std::string& name,
         uint64_t most_records = kMostRecords);
  ~TlsEnd();
  TlsEnd(const TlsEnd&) = delete;
  TlsEnd& operator=(const TlsEnd&) = delete;

  // ---- by memory
  // These bytes have come.
  void Put(const char* bytes, size_t count);
  // What they say: bytes of the other end's, 0 if that isn't known yet. Goes on with the handshake as far as it
  // goes. Throws Error KF_INVALID, with a sentence about the other end, if it is over.
  size_t Read(char* to, size_t bytes);
  // Both ends have shown their certificates, as far as this one knows. Not before may anything be written.
  bool IsEstablished() const;
  void Write(const char* from, size_t bytes);
  // What has to go out. To be asked for after each Read and Write, also after one that has thrown: the other end
  // learns from it why.
  std::vector<char> Take();

  // ---- over a socket
  SocketResult WriteSome(int fd, iovec* parts, size_t num_parts);
  SocketResult ReadSome(int fd, iovec* parts, size_t num_parts);
  // Bytes that WriteSome has taken and the kernel hasn't.
  bool Holds() const { return holds_; }
  // ReadSome may have more at once. To be asked by the thread that calls it.
  bool HasMore() const { return has_more_; }

 private:
  // AES-GCM is safe for 2^24.5 records under one key.
  static constexpr uint64_t kMostRecords = uint64_t{1} << 23;

  static int OnRead(void* bio, char* to, int bytes);
  static int OnWrite(void* bio, const char* from, int bytes);
  static long OnControl(void* bio, int what, long value, void* more);

  bool Encrypt(const char* from, size_t bytes);
  bool EncryptSome(iovec*& parts, size_t& num_parts, size_t& taken);
  SocketResult SendHeld(int fd);
  SocketResult ReceiveSome(int fd);
  std::string WhatIsWrong() const;

  const std::shared_ptr<TlsContext> context_;
  const bool called_;
  const std::string name_;
  const uint64_t most_records_;
  void* session_ = nullptr;
  std::atomic<bool> holds_{false};
  bool has_more_ = true;  // what came to the launcher, whose end it was, may lie here

  mutable std::mutex mutex_;
  // All guarded by mutex_, and the session:
  std::vector<char> in_, out_;           // encrypted
  size_t in_begin_ = 0, out_begin_ = 0;  // of these
  size_t in_end_ = 0;
  uint64_t records_ = 0;      // written under the present key
  std::vector<char> record_;  // one that is put together of several parts
};

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_TLS_H_
