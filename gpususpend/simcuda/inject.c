/* Failure injection and tracing: what tests ask of the simulated driver.
 *
 * Rules come from SIMCUDA_INJECT and from the files `inject` and `inject-<pid>` in the state folder, re-read when
 * their modification time, inode or size changes; a rule counts calls from the moment it was read. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simcuda.h"

enum action { ACT_FAIL, ACT_HANG, ACT_HOLD, ACT_DELAY, ACT_KILL };
struct source;
struct rule {
    char function[64];
    unsigned long nth, seen;
    enum action action;
    int value;
    struct source *source;
    unsigned version; /* of the source, when the rule was read */
};
#define MAX_RULES 64
struct source {
    char path[600];
    struct timespec changed;
    ino_t inode;
    off_t size;
    atomic_uint version; /* how often its rules were read */
    struct rule rules[MAX_RULES];
    int count;
};
static struct source from_environment, from_file, from_own_file;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int rule_count;
static pid_t prepared_for;
static int trace_fd = -1;

static void parse(struct source *source, const char *text) {
    source->count = 0;
    unsigned version = atomic_fetch_add(&source->version, 1) + 1;
    while (*text && source->count < MAX_RULES) {
        char line[200], action[32] = "";
        size_t length = strcspn(text, "\n;");
        snprintf(line, sizeof line, "%.*s", (int)length, text);
        text += length + (text[length] != 0);
        struct rule rule = {.source = source, .version = version};
        int value = 0;
        if (sscanf(line, "%63s %lu %31s %d", rule.function, &rule.nth, action, &value) < 3 || rule.function[0] == '#')
            continue;
        if (!strcmp(action, "hang"))
            rule.action = ACT_HANG;
        else if (!strcmp(action, "hold"))
            rule.action = ACT_HOLD;
        else if (!strcmp(action, "kill"))
            rule.action = ACT_KILL;
        else if (!strcmp(action, "delay"))
            rule.action = ACT_DELAY, rule.value = value;
        else
            rule.action = ACT_FAIL, rule.value = atoi(action);
        source->rules[source->count++] = rule;
    }
}

static void reread(struct source *source) {
    struct stat now;
    if (stat(source->path, &now))
        memset(&now, 0, sizeof now);
    if (now.st_mtim.tv_sec == source->changed.tv_sec && now.st_mtim.tv_nsec == source->changed.tv_nsec
        && now.st_ino == source->inode && now.st_size == source->size)
        return;
    pthread_mutex_lock(&lock);
    source->changed = now.st_mtim;
    source->inode = now.st_ino;
    source->size = now.st_size;
    char text[8192] = "";
    int fd = now.st_ino ? open(source->path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        ssize_t got = read(fd, text, sizeof text - 1);
        text[got > 0 ? got : 0] = 0;
        close(fd);
    }
    parse(source, text);
    atomic_store(&rule_count, from_environment.count + from_file.count + from_own_file.count);
    pthread_mutex_unlock(&lock);
}

/* Read the environment once in each process (a fork has rules of its own, counted from its start). */
static void prepare(void) {
    pthread_mutex_lock(&lock);
    if (prepared_for != getpid()) {
        const char *rules = getenv("SIMCUDA_INJECT"), *trace = getenv("SIMCUDA_TRACE");
        parse(&from_environment, rules ? rules : "");
        snprintf(from_file.path, sizeof from_file.path, "%s/inject", state_folder());
        snprintf(from_own_file.path, sizeof from_own_file.path, "%s/inject-%d", state_folder(), (int)getpid());
        if (trace && trace[0] && trace_fd < 0)
            trace_fd = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        atomic_store(&rule_count, from_environment.count + from_file.count + from_own_file.count);
        prepared_for = getpid();
    }
    pthread_mutex_unlock(&lock);
}

/* Length of the symbol without its ABI suffixes (_v2, _ptsz, _ptds). */
static size_t base_length(const char *symbol) {
    size_t length = strlen(symbol);
    if (length > 5 && (!strcmp(symbol + length - 5, "_ptsz") || !strcmp(symbol + length - 5, "_ptds")))
        length -= 5;
    if (length > 3 && symbol[length - 3] == '_' && symbol[length - 2] == 'v')
        length -= 3;
    return length;
}

static bool named(const struct rule *rule, const char *symbol) {
    return !strcmp(rule->function, symbol)
        || (strlen(rule->function) == base_length(symbol) && !strncmp(rule->function, symbol, strlen(rule->function)));
}

/* Count the call for every rule that names it; the first one that is due stands. */
static const struct rule *due(struct source *source, const char *symbol, const struct rule *found) {
    for (int i = 0; i < source->count; i++)
        if (named(&source->rules[i], symbol) && ++source->rules[i].seen == source->rules[i].nth && !found)
            found = &source->rules[i];
    return found;
}

/* Wait until the rule is taken back; a file of this process's number says meanwhile that it waits. */
static void hold(const struct rule *rule) {
    char mark[600];
    snprintf(mark, sizeof mark, "%s/held-%d", state_folder(), (int)getpid());
    int fd = open(mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
    for (; atomic_load(&rule->source->version) == rule->version; reread(rule->source))
        nap_us(2000);
    unlink(mark);
}

/* Carry out the rule that is due for this call, if any; a code other than 0 means that the call is not performed. */
CUresult inject_check(const char *symbol) {
    if (prepared_for != getpid())
        prepare();
    reread(&from_file);
    reread(&from_own_file);
    if (atomic_load(&rule_count) == 0)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    const struct rule *found = due(&from_environment, symbol, NULL);
    found = due(&from_file, symbol, found);
    found = due(&from_own_file, symbol, found);
    struct rule rule = found ? *found : (struct rule){0};
    pthread_mutex_unlock(&lock);
    if (!found)
        return CUDA_SUCCESS;
    if (rule.action == ACT_KILL)
        kill(getpid(), SIGKILL);
    if (rule.action == ACT_HANG)
        call_hang();
    if (rule.action == ACT_HOLD)
        hold(&rule);
    if (rule.action == ACT_DELAY)
        nap_us((unsigned)rule.value * 1000);
    return rule.action == ACT_FAIL ? rule.value : CUDA_SUCCESS;
}

/* Append "symbol result pid" to the file that SIMCUDA_TRACE names. */
void trace_call(const char *symbol, CUresult result) {
    if (trace_fd < 0)
        return;
    char line[160];
    int length = snprintf(line, sizeof line, "%s %d %d\n", symbol, result, (int)getpid());
    if (write(trace_fd, line, (size_t)length) < 0)
        return; /* a test's trace must not change what the call returns */
}
