/* Device code as bytes: what host/image.c lets through to CUDA, whose own readers trust the headers. */
#include "fuzz.h"

#include "../../host/image.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  image_facts facts;
  memset(&facts, 0x5a, sizeof facts);
  const bool good = image_inspect(data, size, &facts);
  PROMISE(memchr(facts.why, 0, sizeof facts.why) || good, "the reason has no end");
  PROMISE(good || facts.why[0], "refused without a reason");
  PROMISE(!good || (facts.kind >= IMAGE_FATBIN && facts.kind <= IMAGE_PTX), "kind %d", (int)facts.kind);
  return 0;
}
