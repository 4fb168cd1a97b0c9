// TLS for the connections between hosts, with OpenSSL. If TLS is turned on, this layer is between a
// connection and its socket.
//
// A connection begins as a connection between launchers (control.py). Both launchers show their
// certificates and prove that they know the job's secret. The same TLS session is then passed to a
// mesh. So data goes only to the end that has authenticated itself.
//
// OpenSSL never uses a socket itself. The owner of a TlsEnd sends the outgoing bytes from memory,
// and passes the received bytes to the TlsEnd. A launcher uses Put and Take for this. A mesh uses
// WriteSome and ReadSome, which replace the functions in socket.h.
//
// A TlsEnd differs from a socket in two ways, and a mesh handles both (Connection::Holds, HasMore):
// - bytes that WriteSome has accepted may stay here, encrypted, until the kernel has space for
//   them;
// - received bytes may stay here, where epoll can't report them.
//
// Only TLS 1.3 is used, so there is no renegotiation. There are no session tickets. After the
// handshake, only data and key updates are sent. Each direction updates its own key after a number
// of records that is safe for one key (RFC 8446, 5.5). The closing of a connection isn't
// authenticated (no close_notify). If a connection of a mesh is closed, the other host is lost,
// unless all hosts have finished.
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

// The settings that all TLS ends of a host share: the host's certificate, and the CA that must have
// signed the other hosts' certificates. Immutable.
class TlsContext {
 public:
  // The arguments are the paths of PEM files. Throws Error KF_MISSING if there is no OpenSSL, and
  // KF_INVALID if a file is invalid.
  TlsContext(const std::string& certificate, const std::string& key, const std::string& ca);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsEnd;
  void* context_;
};

// One end of a connection. WriteSome and ReadSome may run in two threads at once. Only one thread
// at a time may call the other functions.
class TlsEnd {
 public:
  // `called` is true if the other end has opened the connection. `name` is the host name or address
  // that the other end's certificate must contain. If `name` is empty, any certificate of the CA is
  // accepted. `most_records` is the maximum number of records with the same key.
  TlsEnd(std::shared_ptr<TlsContext> context, bool called, const std::string& name,
         uint64_t most_records = kMostRecords);
  ~TlsEnd();
  TlsEnd(const TlsEnd&) = delete;
  TlsEnd& operator=(const TlsEnd&) = delete;

  // ---- through memory
  // Adds bytes that have been received.
  void Put(const char* bytes, size_t count);
  // Continues the handshake, and returns the number of decrypted bytes, or 0 if there are none yet.
  // If the connection has failed, throws Error KF_INVALID, which describes what the other end has
  // done wrong.
  size_t Read(char* to, size_t bytes);
  // Returns true if both ends have shown their certificates, as far as this end knows. Write
  // nothing before that.
  bool IsEstablished() const;
  void Write(const char* from, size_t bytes);
  // Returns the bytes that must be sent. Call it after each call of Read or Write, even if that
  // call has thrown. The bytes then report the error to the other end.
  std::vector<char> Take();

  // ---- over a socket
  SocketResult WriteSome(int fd, iovec* parts, size_t num_parts);
  SocketResult ReadSome(int fd, iovec* parts, size_t num_parts);
  // Returns true if WriteSome has accepted bytes that the kernel hasn't accepted yet.
  bool Holds() const { return holds_; }
  // Returns true if ReadSome may return more data immediately. Only the thread that calls ReadSome
  // may call this function.
  bool HasMore() const { return has_more_; }

 private:
  // AES-GCM is safe for 2^24.5 records with the same key.
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
  bool has_more_ = true;  // the launcher that owned this end before may already have received bytes

  mutable std::mutex mutex_;
  // `mutex_` guards these members and the session:
  std::vector<char> in_, out_;           // encrypted bytes
  size_t in_begin_ = 0, out_begin_ = 0;  // where the unprocessed parts of `in_` and `out_` begin
  size_t in_end_ = 0;
  uint64_t records_ = 0;      // number of records that were written with the current key
  std::vector<char> record_;  // a record that is composed of several parts
};

}  // namespace kungfu::tcp

#endif  // KUNGFU_TRANSPORT_TCP_TLS_H_
