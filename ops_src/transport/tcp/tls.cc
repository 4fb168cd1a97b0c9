#include "transport/tcp/tls.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "transport/tcp/openssl_api.h"

namespace kungfu::tcp {
namespace {

using openssl::Api;

constexpr size_t kRecordBytes = 16 << 10;  // maximum payload of a TLS record
constexpr size_t kBatchBytes = 64 << 10;   // number of bytes that are encrypted and then sent together; they fit into a
                                           // core's cache
constexpr size_t kMostInBytes = 64 << 10;  // number of bytes that are received and then decrypted together
// AES with 128-bit keys comes first, because it is as safe as the others for this purpose, and
// faster by a third.
constexpr char kCipherSuites[] = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

// Opens OpenSSL when it is first used. Throws if there is no OpenSSL.
const Api& OpenSsl() {
  static const Api api;
  return api;
}

std::string LastError() {
  const Api& api = OpenSsl();
  const unsigned long error = api.TakeError();
  api.ClearErrors();
  const char* const text = error == 0 ? nullptr : api.ErrorText(error);
  return text == nullptr ? "unknown error" : text;
}

// Without this callback, OpenSSL would prompt for the password of an encrypted key, and the job
// would hang.
int NoPassword(char*, int, int, void*) { return -1; }

bool Contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TlsContext::TlsContext(const std::string& certificate, const std::string& key, const std::string& ca) {
  const Api& api = OpenSsl();
  api.ClearErrors();
  context_ = api.ContextNew(api.TlsMethod());
  if (context_ == nullptr) throw Error(KF_INTERNAL, Text("OpenSSL can't allocate memory: ", LastError()));
  const auto refuse = [&](const char* what, const std::string& file) {
    const std::string why = LastError();
    api.ContextFree(context_);
    throw Error(KF_INVALID, Text(what, " ", file, " can't be used: ", why));
  };
  api.ContextControl(context_, openssl::kCtrlMinVersion, openssl::kTls13, nullptr);
  api.SetCipherSuites(context_, kCipherSuites);
  api.SetTickets(context_, 0);
  api.SetPassword(context_, NoPassword);
  api.SetVerify(context_, openssl::kVerifyPeer, nullptr);
  if (api.UseCertificate(context_, certificate.c_str()) != 1) refuse("the certificate", certificate);
  if (api.UseKey(context_, key.c_str(), openssl::kPem) != 1) refuse("the key", key);
  if (api.UseAuthority(context_, ca.c_str(), nullptr) != 1) refuse("the CA's certificate", ca);
}

TlsContext::~TlsContext() { OpenSsl().ContextFree(context_); }

TlsEnd::TlsEnd(std::shared_ptr<TlsContext> context, bool called, const std::string& name, uint64_t most_records)
    : context_(std::move(context)), called_(called), name_(name), most_records_(most_records) {
  const Api& api = OpenSsl();
  static openssl::BioMethod* const method = [&] {
    openssl::BioMethod* const made = api.BioMethodNew(openssl::kBioSource, "kungfu");
    api.SetBioRead(made, OnRead);
    api.SetBioWrite(made, OnWrite);
    api.SetBioControl(made, OnControl);
    return made;
  }();
  session_ = api.SessionNew(context_->context_);
  openssl::Bio* const bio = session_ == nullptr ? nullptr : api.BioNew(method);
  if (bio == nullptr) {
    if (session_ != nullptr) api.SessionFree(session_);
    throw Error(KF_INTERNAL, Text("OpenSSL can't allocate memory: ", LastError()));
  }
  api.SetBioData(bio, this);
  api.SetBioInit(bio, 1);
  api.SetBios(session_, bio, bio);  // from now on, the session owns the BIO
  if (!name.empty()) {
    // OpenSSL compares an address only with the certificate's addresses, and a name only with the
    // certificate's names.
    openssl::Parameters* const parameters = api.ParametersOf(session_);
    char address[sizeof(in6_addr)];
    const bool is_address =
        inet_pton(AF_INET, name.c_str(), address) == 1 || inet_pton(AF_INET6, name.c_str(), address) == 1;
    const int done = is_address ? api.ExpectAddress(parameters, name.c_str())
                                : api.ExpectName(parameters, name.c_str(), name.size());
    if (done != 1) {
      api.SessionFree(session_);
      throw Error(KF_INVALID, Text(name, " can't be the name in a certificate"));
    }
  }
  called ? api.SetCalled(session_) : api.SetCaller(session_);
}

TlsEnd::~TlsEnd() { OpenSsl().SessionFree(session_); }

// ---- OpenSSL's callbacks for bytes

int TlsEnd::OnRead(void* bio, char* to, int bytes) {
  const Api& api = OpenSsl();
  TlsEnd& end = *static_cast<TlsEnd*>(api.BioData(bio));
  api.ClearBioFlags(bio, openssl::kBioRetryRead);
  const size_t count = std::min(static_cast<size_t>(std::max(bytes, 0)), end.in_end_ - end.in_begin_);
  if (count == 0) {
    api.SetBioFlags(bio, openssl::kBioRetryRead);
    return -1;
  }
  std::memcpy(to, end.in_.data() + end.in_begin_, count);
  end.in_begin_ += count;
  return static_cast<int>(count);
}

int TlsEnd::OnWrite(void* bio, const char* from, int bytes) {
  std::vector<char>& out = static_cast<TlsEnd*>(OpenSsl().BioData(bio))->out_;
  try {
    out.insert(out.end(), from, from + bytes);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return bytes;
}

long TlsEnd::OnControl(void*, int what, long, void*) { return what == openssl::kBioFlush ? 1 : 0; }

// ---- bytes in memory

void TlsEnd::Put(const char* bytes, size_t count) {
  const std::lock_guard<std::mutex> guard(mutex_);
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(in_begin_));
  in_end_ -= std::exchange(in_begin_, 0);
  in_.resize(in_end_);
  in_.insert(in_.end(), bytes, bytes + count);
  in_end_ += count;
}

size_t TlsEnd::Read(char* to, size_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const Api& api = OpenSsl();
  api.ClearErrors();
  const int n = api.Read(session_, to, static_cast<int>(std::min<size_t>(bytes, INT_MAX)));
  if (n > 0) return static_cast<size_t>(n);
  if (api.ErrorOf(session_, n) == openssl::kWantRead) return 0;
  throw Error(KF_INVALID, WhatIsWrong());
}

bool TlsEnd::IsEstablished() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return OpenSsl().IsEstablished(session_) == 1;
}

void TlsEnd::Write(const char* from, size_t bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!Encrypt(from, bytes)) throw Error(KF_INVALID, WhatIsWrong());
}

std::vector<char> TlsEnd::Take() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(out_, {});
}

// ---- over a socket

SocketResult TlsEnd::WriteSome(int fd, iovec* parts, size_t num_parts) {
  const std::lock_guard<std::mutex> guard(mutex_);
  size_t taken = 0;
  for (;;) {
    const SocketResult sent = SendHeld(fd);
    holds_ = !out_.empty();
    if (sent.moved == Moved::kError) return sent;
    if (holds_ || num_parts == 0) break;
    if (!EncryptSome(parts, num_parts, taken)) return {Moved::kError, 0, EPROTO};
  }
  return {taken > 0 ? Moved::kSome : Moved::kNothing, taken, 0};
}

SocketResult TlsEnd::ReadSome(int fd, iovec* parts, size_t num_parts) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const Api& api = OpenSsl();
  has_more_ = false;
  size_t got = 0;
  for (size_t p = 0; p < num_parts; p++) {
    for (size_t at = 0; at < parts[p].iov_len;) {
      api.ClearErrors();
      const size_t left = std::min<size_t>(parts[p].iov_len - at, INT_MAX);
      const int n = api.Read(session_, static_cast<char*>(parts[p].iov_base) + at, static_cast<int>(left));
      if (n > 0) {
        at += static_cast<size_t>(n);
        got += static_cast<size_t>(n);
        continue;
      }
      const int error = api.ErrorOf(session_, n);
      SocketResult result{Moved::kError, 0, EBADMSG};
      if (error == openssl::kEnded) result = {Moved::kEnd, 0, 0};
      if (error == openssl::kWantRead) result = ReceiveSome(fd);
      if (result.moved == Moved::kSome) continue;
      if (got == 0) return result;
      // Return the received bytes first. The next call will report the end or the error again.
      has_more_ = result.moved != Moved::kNothing;
      return {Moved::kSome, got, 0};
    }
  }
  has_more_ = true;
  return {Moved::kSome, got, 0};
}

// ---- functions whose callers hold the mutex

bool TlsEnd::Encrypt(const char* from, size_t bytes) {
  const Api& api = OpenSsl();
  api.ClearErrors();
  const uint64_t records = (bytes + kRecordBytes - 1) / kRecordBytes;
  records_ += records;
  if (records_ > most_records_) {
    records_ = records;
    if (api.UpdateKey(session_, openssl::kUpdateOneWay) != 1) return false;
  }
  return bytes == 0 || api.Write(session_, from, static_cast<int>(bytes)) == static_cast<int>(bytes);
}

// Encrypts a batch. A small part shares a record with the beginning of the next part, because each
// record costs an additional microsecond.
bool TlsEnd::EncryptSome(iovec*& parts, size_t& num_parts, size_t& taken) {
  const auto take = [&](size_t count) {
    taken += count;
    parts->iov_base = static_cast<char*>(parts->iov_base) + count;
    parts->iov_len -= count;
    if (parts->iov_len > 0) return;
    parts++;
    num_parts--;
  };
  while (num_parts > 0 && out_.size() < kBatchBytes) {
    if (parts->iov_len >= kRecordBytes || num_parts == 1) {
      const size_t count = std::min(parts->iov_len, kBatchBytes);
      if (!Encrypt(static_cast<const char*>(parts->iov_base), count)) return false;
      take(count);
      continue;
    }
    record_.clear();
    while (num_parts > 0 && record_.size() < kRecordBytes) {
      const size_t count = std::min(parts->iov_len, kRecordBytes - record_.size());
      const char* const from = static_cast<const char*>(parts->iov_base);
      record_.insert(record_.end(), from, from + count);
      take(count);
    }
    if (!Encrypt(record_.data(), record_.size())) return false;
  }
  return true;
}

SocketResult TlsEnd::SendHeld(int fd) {
  while (out_begin_ < out_.size()) {
    iovec part{out_.data() + out_begin_, out_.size() - out_begin_};
    const SocketResult result = tcp::WriteSome(fd, &part, 1);
    if (result.moved != Moved::kSome) return result;
    out_begin_ += result.bytes;
  }
  out_.clear();
  out_begin_ = 0;
  return {Moved::kSome, 0, 0};
}

// Receives more data. Call it only if all received bytes have been decrypted.
SocketResult TlsEnd::ReceiveSome(int fd) {
  in_.resize(std::max(in_.size(), kMostInBytes));
  in_begin_ = in_end_ = 0;
  iovec part{in_.data(), in_.size()};
  const SocketResult result = tcp::ReadSome(fd, &part, 1);
  if (result.moved == Moved::kSome) in_end_ = result.bytes;
  return result;
}

// Returns a description of what the other end has done wrong.
std::string TlsEnd::WhatIsWrong() const {
  const Api& api = OpenSsl();
  const long verified = api.VerifyResult(session_);
  const std::string why = LastError();
  if (Contains(why, "verify failed") && verified != 0) {
    return Text("its certificate isn't accepted (", api.VerifyText(verified), name_.empty() ? "" : "; it must be for ",
                name_, ")");
  }
  if (Contains(why, "did not return a certificate")) return "it sent no certificate";
  if (Contains(why, "alert")) return Text("it doesn't accept this host's certificate (", why, ")");
  return Text("its TLS messages are invalid (", why, ")");
}

}  // namespace kungfu::tcp
