// The functions of CUDA's libraries that the stub does not model: each ends the process with a
// sentence that names it. build.py writes their list, which is that of the installed libraries.
//
// Part of lightning-batchmem, under the Apache License 2.0 (LICENSE).

extern "C" [[noreturn]] void cuda_stub_not_modelled(const char* library, const char* function,
                                                    const void* caller);

#define NOT_MODELLED(library, name)                                      \
  __attribute__((section("not_modelled"))) void name() {                 \
    cuda_stub_not_modelled(library, #name, __builtin_return_address(0)); \
  }

// The form for programs whose default stream belongs to a thread: the stub has one queue for all.
#define SAME_AS(name, modelled) \
  asm(".globl " #name "\n.type " #name ", @function\n" #name ": jmp " #modelled "@PLT");

extern "C" {
#include "not_modelled.inc"
}
