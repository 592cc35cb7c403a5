/* replay.c - main of a fuzz target where libFuzzer does not drive it.
 *
 *     fuzz_NAME PATH...      each a file, or a folder of files
 *
 * Feeds every input once and says how many there were; none at all is a
 * failure. Each input stands in memory of its own exact size, so that the
 * sanitizers see a read past its end. */
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool
replay_file(const char *path, size_t size)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = malloc(size ? size : 1);
    bool whole = file && data && fread(data, 1, size, file) == size;

    if (file)
        fclose(file);
    if (whole) {
        /* Said before: a crash then names its input. */
        printf("%s\n", path);
        fflush(stdout);
        LLVMFuzzerTestOneInput(data, size);
    } else {
        perror(path);
    }
    free(data);
    return whole;
}

static bool
replay(const char *path, size_t *n)
{
    struct dirent **entries = NULL;
    struct stat st;
    bool good = true;
    int n_entries;

    if (stat(path, &st) == -1) {
        perror(path);
        return false;
    }
    if (!S_ISDIR(st.st_mode)) {
        ++*n;
        return replay_file(path, (size_t)st.st_size);
    }
    n_entries = scandir(path, &entries, NULL, alphasort);
    for (int i = 0; i < n_entries; i++) {
        char below[4096];

        if (entries[i]->d_name[0] != '.') {
            snprintf(below, sizeof(below), "%s/%s", path, entries[i]->d_name);
            good = replay(below, n) && good;
        }
        free(entries[i]);
    }
    free(entries);
    return good && n_entries >= 0;
}

int
main(int argc, char **argv)
{
    bool good = true;
    size_t n = 0;

    for (int i = 1; i < argc; i++)
        good = replay(argv[i], &n) && good;
    printf("%zu inputs replayed\n", n);
    return good && n > 0 ? 0 : 1;
}
