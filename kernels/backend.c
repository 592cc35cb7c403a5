#include "kernels/backend.h"

#include <dlfcn.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static const char plugin[] = "libnightshift-cuda.so";
static const char plugin_symbol[] = "ns_backend_cuda_open";

typedef enum ns_status open_fn(const struct ns_backend_options *options,
                               struct ns_backend **out, struct ns_error *err);

/* One package serves machines with and without a GPU: nothing of CUDA is
 * linked, the plug-in is looked for when it is asked for. */
static enum ns_status
open_cuda(const struct ns_backend_options *options, struct ns_backend **out,
          struct ns_error *err)
{
    enum ns_status status;
    open_fn *open_plugin;
    void *library;
    void *symbol;

    library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return ns_fail(err, NS_REJECT,
                       "backend \"cuda\" needs the plug-in %s: %s", plugin,
                       dlerror());
    symbol = dlsym(library, plugin_symbol);
    if (!symbol) {
        dlclose(library);
        return ns_fail(err, NS_REJECT, "%s has no %s: it is of another build",
                       plugin, plugin_symbol);
    }
    memcpy(&open_plugin, &symbol, sizeof(open_plugin));
    status = open_plugin(options, out, err);
    if (status != NS_OK)
        dlclose(library);
    /* An open one stays loaded for the life of the process: the driver leaves
     * threads and exit handlers behind that must not lose their code. */
    return status;
}

enum ns_status
ns_backend_open(const struct ns_backend_options *options,
                struct ns_backend **out, struct ns_error *err)
{
    const char *name = options->name ? options->name : "cpu";

    if (strcmp(name, "cpu") == 0)
        return cpu_open(options, out, err);
    if (strcmp(name, "cuda") == 0)
        return open_cuda(options, out, err);
    return ns_fail(err, NS_REJECT,
                   "there is no backend \"%.40s\"; there are cpu and cuda",
                   name);
}

void
ns_backend_close(struct ns_backend *be)
{
    if (be)
        be->ops->close(be);
}
