// What the plugin tells about itself.

extern "C" __attribute__((visibility("default"))) const char* kungfu_ms_version() { return KUNGFU_MINDSPORE_VERSION; }
