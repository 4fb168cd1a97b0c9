// The runtime's own declarations of the OpenSSL functions that it calls, so that the build doesn't
// need OpenSSL. OpenSSL is opened only if TLS is turned on. The same wheel runs with OpenSSL 1.1.1,
// with OpenSSL 3, and (without TLS) if there is no OpenSSL. If OpenSSL's headers are installed,
// tests/cpp/tls_test.cc compares the declarations with them.
#ifndef KUNGFU_TRANSPORT_TCP_OPENSSL_API_H_
#define KUNGFU_TRANSPORT_TCP_OPENSSL_API_H_

#include "base/library.h"

namespace kungfu::tcp::openssl {

// OpenSSL's types. This code uses only pointers to them.
using Method = void;      // SSL_METHOD
using Context = void;     // SSL_CTX
using Session = void;     // SSL
using Parameters = void;  // X509_VERIFY_PARAM
using Bio = void;         // BIO
using BioMethod = void;   // BIO_METHOD
using AskPassword = int (*)(char* buffer, int size, int encrypts, void* user);

inline constexpr int kCtrlMinVersion = 123;  // SSL_CTRL_SET_MIN_PROTO_VERSION
inline constexpr long kTls13 = 0x0304;       // TLS1_3_VERSION
inline constexpr int kPem = 1;               // SSL_FILETYPE_PEM
inline constexpr int kVerifyPeer = 1 | 2;    // SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT
inline constexpr int kWantRead = 2;          // SSL_ERROR_WANT_READ
inline constexpr int kEnded = 6;             // SSL_ERROR_ZERO_RETURN
inline constexpr int kUpdateOneWay = 0;      // SSL_KEY_UPDATE_NOT_REQUESTED
inline constexpr int kBioRetryRead = 1 | 8;  // BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY
inline constexpr int kBioFlush = 11;         // BIO_CTRL_FLUSH
inline constexpr int kBioSource = 1024;      // BIO_TYPE_SOURCE_SINK

struct Api {
  const Library library{"OpenSSL (libssl)", nullptr, {"libssl.so.3", "libssl.so.1.1", "libssl.so"}};

  const Method* (*TlsMethod)() = library.Find("TLS_method");
  Context* (*ContextNew)(const Method* method) = library.Find("SSL_CTX_new");
  void (*ContextFree)(Context* context) = library.Find("SSL_CTX_free");
  long (*ContextControl)(Context* context, int what, long value, void* more) = library.Find("SSL_CTX_ctrl");
  int (*SetCipherSuites)(Context* context, const char* names) = library.Find("SSL_CTX_set_ciphersuites");
  int (*SetTickets)(Context* context, size_t count) = library.Find("SSL_CTX_set_num_tickets");
  void (*SetPassword)(Context* context, AskPassword ask) = library.Find("SSL_CTX_set_default_passwd_cb");
  void (*SetVerify)(Context* context, int mode, void* callback) = library.Find("SSL_CTX_set_verify");
  int (*UseCertificate)(Context* context, const char* file) = library.Find("SSL_CTX_use_certificate_chain_file");
  int (*UseKey)(Context* context, const char* file, int kind) = library.Find("SSL_CTX_use_PrivateKey_file");
  int (*UseAuthority)(Context* context, const char* file,
                      const char* folder) = library.Find("SSL_CTX_load_verify_locations");

  Session* (*SessionNew)(Context* context) = library.Find("SSL_new");
  void (*SessionFree)(Session* session) = library.Find("SSL_free");
  void (*SetBios)(Session* session, Bio* in, Bio* out) = library.Find("SSL_set_bio");
  void (*SetCaller)(Session* session) = library.Find("SSL_set_connect_state");
  void (*SetCalled)(Session* session) = library.Find("SSL_set_accept_state");
  Parameters* (*ParametersOf)(Session* session) = library.Find("SSL_get0_param");
  int (*ExpectName)(Parameters* parameters, const char* name,
                    size_t length) = library.Find("X509_VERIFY_PARAM_set1_host");
  int (*ExpectAddress)(Parameters* parameters, const char* address) = library.Find("X509_VERIFY_PARAM_set1_ip_asc");
  int (*Read)(Session* session, void* to, int bytes) = library.Find("SSL_read");
  int (*Write)(Session* session, const void* from, int bytes) = library.Find("SSL_write");
  int (*ErrorOf)(const Session* session, int result) = library.Find("SSL_get_error");
  int (*IsEstablished)(const Session* session) = library.Find("SSL_is_init_finished");
  int (*UpdateKey)(Session* session, int how) = library.Find("SSL_key_update");
  long (*VerifyResult)(const Session* session) = library.Find("SSL_get_verify_result");
  const char* (*VerifyText)(long result) = library.Find("X509_verify_cert_error_string");

  BioMethod* (*BioMethodNew)(int type, const char* name) = library.Find("BIO_meth_new");
  int (*SetBioRead)(BioMethod* method, int (*read)(Bio*, char*, int)) = library.Find("BIO_meth_set_read");
  int (*SetBioWrite)(BioMethod* method, int (*write)(Bio*, const char*, int)) = library.Find("BIO_meth_set_write");
  int (*SetBioControl)(BioMethod* method, long (*control)(Bio*, int, long, void*)) = library.Find("BIO_meth_set_ctrl");
  Bio* (*BioNew)(const BioMethod* method) = library.Find("BIO_new");
  void (*SetBioInit)(Bio* bio, int is_ready) = library.Find("BIO_set_init");
  void (*SetBioData)(Bio* bio, void* data) = library.Find("BIO_set_data");
  void* (*BioData)(Bio* bio) = library.Find("BIO_get_data");
  void (*SetBioFlags)(Bio* bio, int flags) = library.Find("BIO_set_flags");
  void (*ClearBioFlags)(Bio* bio, int flags) = library.Find("BIO_clear_flags");

  unsigned long (*TakeError)() = library.Find("ERR_get_error");
  void (*ClearErrors)() = library.Find("ERR_clear_error");
  const char* (*ErrorText)(unsigned long error) = library.Find("ERR_reason_error_string");
};

}  // namespace kungfu::tcp::openssl

#endif  // KUNGFU_TRANSPORT_TCP_OPENSSL_API_H_
