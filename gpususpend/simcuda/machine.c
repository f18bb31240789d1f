/* The simulated machine: what its processes share, in one folder.
 *
 *   machine      one shared table, under a robust mutex: processes, physical memory, exports
 *   mem-<id>     the bytes of one physical allocation
 *   nvidiactl    empty; every open of it by this driver is a descriptor that /proc shows as the real driver's
 *   nvidia<N>    empty; open while a process has a context on GPU N
 *
 * Who lives is never asked by pid: each process and each export holds a lock (F_OFD_SETLK) on one byte of nvidiactl,
 * far behind any byte that others would lock, through an open file of its own. The kernel drops it with the last copy
 * of that descriptor, wherever it was sent, so kill -9 leaves nothing that the next caller cannot reap. An export's
 * open file carries its number as its file offset. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "machine.h"

static struct machine *machine;
static int slot = -1, alive_fd = -1, device_fds[MAX_DEVICES];
static uint64_t nonce;
static bool exiting;
static uint32_t devices_here;
static uint64_t memory_here;

/* What root makes in the folder of a user is that user's: a process of theirs has to open it. */
static int open_in_folder(const char *name, int flags) {
    char path[600];
    struct stat folder;
    snprintf(path, sizeof path, "%s/%s", state_folder(), name);
    int fd = open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd >= 0 && (flags & O_CREAT) && geteuid() == 0 && stat(state_folder(), &folder) == 0
        && fchown(fd, folder.st_uid, folder.st_gid) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static bool byte_lock(int fd, off_t at) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

/* Tell whether any open file other than fd's own holds the byte. */
static bool byte_locked(int fd, off_t at) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* ---- the table; every function below is called with its lock held ---- */

static bool exported(struct machine *m, uint64_t id, int probe) {
    bool found = false;
    for (uint32_t i = 0; i < m->exports_used; i++) {
        if (m->exports[i].number == 0 || m->exports[i].object != id)
            continue;
        if (byte_locked(probe, EXPORT_BYTE + (off_t)m->exports[i].number))
            found = true;
        else
            m->exports[i] = (struct shared_export){0};
    }
    return found;
}

static void forget_object(struct shared_object *o) {
    char name[64], path[700];
    snprintf(name, sizeof name, "mem-%llx", (unsigned long long)o->object.id);
    snprintf(path, sizeof path, "%s/%s", state_folder(), name);
    unlink(path);
    memset(o, 0, sizeof *o);
}

void machine_collect(struct machine *m, struct shared_object *o, int probe) {
    if (!o->object.id || machine_any(o->holders) || team_binds(m, o->object.id))
        return;
    /* Reported: who imports a multicast object that only a descriptor keeps gets an empty one. */
    if (o->object.team)
        team_empty(m, o, probe);
    if (!exported(m, o->object.id, probe))
        forget_object(o);
}

/* Drop what dead processes held and exports that nobody has open any more. */
void machine_reap(struct machine *m) {
    int probe = open_in_folder("nvidiactl", O_RDWR);
    if (probe < 0)
        return;
    for (int p = 0; p < MAX_PROCESSES; p++) {
        if (!m->processes[p].used || (m == machine && p == slot) || byte_locked(probe, PROCESS_BYTE + p))
            continue;
        memset(&m->processes[p], 0, sizeof m->processes[p]);
        team_process_gone(m, p);
        interprocess_process_gone(m, p);
        for (uint32_t i = 0; i < m->objects_used; i++)
            m->objects[i].holders[p / 64] &= ~((uint64_t)1 << p % 64);
    }
    for (uint32_t i = 0; i < m->objects_used; i++)
        machine_collect(m, &m->objects[i], probe);
    while (m->objects_used && !m->objects[m->objects_used - 1].object.id)
        m->objects_used--;
    while (m->exports_used && !m->exports[m->exports_used - 1].number)
        m->exports_used--;
    close(probe);
}

static size_t used_on(struct machine *m, int device) {
    size_t used = 0;
    for (uint32_t i = 0; i < m->objects_used; i++)
        if (m->objects[i].object.id && m->objects[i].object.device == device)
            used += m->objects[i].object.charged;
    for (int p = 0; p < MAX_PROCESSES; p++)
        if (m->processes[p].used && m->processes[p].context_on[device])
            used += CONTEXT_COST;
    return used;
}

struct shared_object *machine_find(struct machine *m, uint64_t id) {
    for (uint32_t i = 0; i < m->objects_used; i++)
        if (m->objects[i].object.id == id)
            return &m->objects[i];
    return NULL;
}

static void lock_table(struct machine *m) {
    if (pthread_mutex_lock(&m->lock) == EOWNERDEAD) {
        /* Its owner was killed in mid-edit: every edit leaves a table that reaping makes whole. */
        pthread_mutex_consistent(&m->lock);
        machine_reap(m);
    }
}

struct machine *machine_lock(void) {
    lock_table(machine);
    return machine;
}
void machine_unlock(void) { pthread_mutex_unlock(&machine->lock); }
struct machine *machine_here(void) { return machine; }
int machine_slot(void) { return slot; }
int machine_probe(void) { return open_in_folder("nvidiactl", O_RDWR); }

/* ---- the folder ---- */

static int lock_folder(bool create) {
    for (;;) {
        if (create && mkdir(state_folder(), 0700) && errno != EEXIST)
            return -1;
        int fd = open(state_folder(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0) {
            if (create && errno == ENOENT)
                continue;
            return -1;
        }
        struct stat here, there;
        if (flock(fd, LOCK_EX) == 0 && fstat(fd, &here) == 0 && stat(state_folder(), &there) == 0
            && here.st_ino == there.st_ino && here.st_dev == there.st_dev) {
            if (here.st_uid == geteuid() || geteuid() == 0)
                return fd;
            close(fd);
            return -1;
        }
        close(fd); /* removed by the last process that left: again */
    }
}

/* Unlocked by name: a child that was forked meanwhile has the descriptor, too. */
static void unlock_folder(int fd) {
    if (fd < 0)
        return;
    flock(fd, LOCK_UN);
    close(fd);
}

static uint64_t number_from(const char *variable, uint64_t otherwise) {
    const char *text = getenv(variable);
    return text && text[0] ? strtoull(text, NULL, 0) : otherwise;
}

static void format(struct machine *m) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&m->lock, &attributes);
    /* A process that comes back from a checkpoint keeps the machine that it knew. */
    m->devices = memory_here ? devices_here : (uint32_t)number_from("SIMCUDA_DEVICES", 2);
    m->device_memory = memory_here ? memory_here : number_from("SIMCUDA_MEMORY", (uint64_t)4 << 30);
    if (m->devices > MAX_DEVICES)
        m->devices = MAX_DEVICES;
    m->next_object = 1;
    m->next_export = 1;
    m->layout = LAYOUT;
}

static struct machine *map_machine(bool create) {
    int fd = open_in_folder("machine", O_RDWR | (create ? O_CREAT : 0));
    struct stat info;
    if (fd < 0 || fstat(fd, &info) || (create && info.st_size == 0 && ftruncate(fd, sizeof(struct machine)))
        || (info.st_size != 0 && info.st_size != sizeof(struct machine)) || (!create && info.st_size == 0)) {
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    struct machine *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (m == MAP_FAILED)
        return NULL;
    if (m->layout == 0 && create)
        format(m);
    if (m->layout == LAYOUT)
        return m;
    munmap(m, sizeof *m);
    return NULL;
}

static bool take_slot(struct machine *m) {
    int fd = open_in_folder("nvidiactl", O_RDWR | O_CREAT);
    if (fd < 0)
        return false;
    lock_table(m);
    machine_reap(m);
    for (int p = 0; p < MAX_PROCESSES && slot < 0; p++) {
        if (m->processes[p].used || !byte_lock(fd, PROCESS_BYTE + p))
            continue;
        m->processes[p] = (struct shared_process){.used = 1, .pid = (uint32_t)getpid(), .nonce = nonce};
        slot = p;
    }
    pthread_mutex_unlock(&m->lock);
    if (slot < 0) {
        close(fd);
        return false;
    }
    alive_fd = fd;
    return true;
}

/* Join the machine, making it when this is its first process. */
CUresult machine_attach(void) {
    int folder = lock_folder(true);
    if (folder < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (!nonce)
        nonce = random_u64();
    struct machine *m = map_machine(true);
    CUresult result = CUDA_ERROR_OPERATING_SYSTEM;
    if (m && take_slot(m)) {
        madvise(m, sizeof *m, MADV_DONTFORK);
        machine = m;
        devices_here = m->devices;
        memory_here = m->device_memory;
        for (int d = 0; d < MAX_DEVICES; d++)
            device_fds[d] = -1;
        result = CUDA_SUCCESS;
    } else if (m) {
        munmap(m, sizeof *m);
    }
    unlock_folder(folder);
    return result;
}

static bool machine_is_empty(struct machine *m) {
    for (int p = 0; p < MAX_PROCESSES; p++)
        if (m->processes[p].used)
            return false;
    for (uint32_t i = 0; i < m->objects_used; i++)
        if (m->objects[i].object.id)
            return false;
    return true;
}

static void remove_folder(void) {
    DIR *folder = opendir(state_folder());
    if (!folder)
        return;
    for (struct dirent *entry; (entry = readdir(folder));)
        /* Files that a test laid there (inject...) stay, and the folder with them. */
        if (!strcmp(entry->d_name, "machine") || !strncmp(entry->d_name, "nvidia", 6) || !strncmp(entry->d_name, "mem-", 4))
            unlinkat(dirfd(folder), entry->d_name, 0);
    /* Root would make the next one in its own name, and the user's processes may come back from a checkpoint. */
    struct stat info;
    bool own = fstat(dirfd(folder), &info) == 0 && info.st_uid == geteuid();
    closedir(folder);
    if (own)
        rmdir(state_folder());
}

/* Leave the machine with every descriptor and mapping of it; the last one removes it. */
void machine_detach(void) {
    if (!machine || slot < 0)
        return;
    int folder = lock_folder(false);
    for (int d = 0; d < MAX_DEVICES; d++)
        machine_set_context(d, false);
    lock_table(machine);
    for (uint32_t i = 0; i < machine->objects_used; i++)
        machine->objects[i].holders[slot / 64] &= ~((uint64_t)1 << slot % 64);
    memset(&machine->processes[slot], 0, sizeof machine->processes[slot]);
    team_process_gone(machine, slot);
    interprocess_process_gone(machine, slot);
    slot = -1;
    machine_reap(machine);
    bool empty = machine_is_empty(machine);
    pthread_mutex_unlock(&machine->lock);
    close(alive_fd);
    alive_fd = -1;
    if (!exiting) {
        munmap(machine, sizeof *machine);
        machine = NULL;
    }
    if (folder >= 0 && empty)
        remove_folder();
    unlock_folder(folder);
}

uint64_t machine_nonce(void) { return nonce; }
int machine_device_count(void) { return (int)devices_here; }
size_t machine_device_memory(void) { return memory_here; }

/* A forked child gives back the descriptors, so that it does not keep its parent alive. */
void machine_forked_child(void) {
    machine = NULL;
    slot = -1;
    if (alive_fd >= 0)
        close(alive_fd);
    alive_fd = -1;
    for (int d = 0; d < MAX_DEVICES; d++) {
        if (device_fds[d] >= 0)
            close(device_fds[d]);
        device_fds[d] = -1;
    }
}

/* Other threads may still be inside the driver: the table stays mapped under them. */
__attribute__((destructor)) static void leave_at_exit(void) {
    exiting = true;
    machine_detach();
}

/* ---- contexts and room ---- */

void machine_set_context(int physical, bool active) {
    if (!machine || (device_fds[physical] >= 0) == active)
        return;
    if (active) {
        char name[32];
        snprintf(name, sizeof name, "nvidia%d", physical);
        device_fds[physical] = open_in_folder(name, O_RDWR | O_CREAT);
    } else {
        close(device_fds[physical]);
        device_fds[physical] = -1;
    }
    lock_table(machine);
    machine->processes[slot].context_on[physical] = active;
    pthread_mutex_unlock(&machine->lock);
}

/* Tell whether a process or an export has gone without a trace in the table; takes no lock. */
static bool anything_dead(struct machine *m) {
    int probe = open_in_folder("nvidiactl", O_RDWR);
    bool dead = false;
    for (int p = 0; p < MAX_PROCESSES && probe >= 0 && !dead; p++)
        dead = m->processes[p].used && p != slot && !byte_locked(probe, PROCESS_BYTE + p);
    for (uint32_t i = 0; i < m->exports_used && probe >= 0 && !dead; i++) {
        uint64_t number = m->exports[i].number;
        dead = number && !byte_locked(probe, EXPORT_BYTE + (off_t)number);
    }
    close(probe);
    return dead;
}

/* Bytes free on a GPU. In the usual case without the table's lock: a thread that ptrace stops in the middle of this
 * question holds up nobody. */
size_t machine_device_free(int physical) {
    if (anything_dead(machine)) {
        lock_table(machine);
        machine_reap(machine);
        pthread_mutex_unlock(&machine->lock);
    }
    size_t used = used_on(machine, physical), all = machine->device_memory;
    return used < all ? all - used : 0;
}

/* Tell whether every physical GPU has as many bytes free as needed[] says. */
bool machine_has_room(const size_t *needed) {
    for (int d = 0; d < machine_device_count(); d++)
        if (needed[d] > machine_device_free(d))
            return false;
    return true;
}

/* ---- physical memory ---- */

static struct shared_object *free_object(struct machine *m) {
    for (uint32_t i = 0; i < m->objects_used; i++)
        if (!m->objects[i].object.id)
            return &m->objects[i];
    return m->objects_used < MAX_OBJECTS ? &m->objects[m->objects_used++] : NULL;
}

static bool make_bytes(uint64_t id, size_t size) {
    char name[64];
    snprintf(name, sizeof name, "mem-%llx", (unsigned long long)id);
    int fd = open_in_folder(name, O_RDWR | O_CREAT | O_EXCL);
    bool made = fd >= 0 && ftruncate(fd, (off_t)size) == 0;
    if (fd >= 0)
        close(fd);
    return made;
}

/* Make physical memory as *object describes it, held by this process; fills in id, creator. */
CUresult machine_object_create(struct machine_object *object) {
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    lock_table(machine);
    bool room = true;
    if (object->device >= 0 && used_on(machine, object->device) + object->charged > machine->device_memory) {
        machine_reap(machine);
        room = used_on(machine, object->device) + object->charged <= machine->device_memory;
    }
    struct shared_object *o = room ? free_object(machine) : NULL;
    if (o) {
        object->id = machine->next_object++;
        object->creator = nonce;
        if (object->team || make_bytes(object->id, object->size)) {
            memset(o, 0, sizeof *o);
            o->holders[slot / 64] |= (uint64_t)1 << slot % 64;
            o->object = *object;
            result = CUDA_SUCCESS;
        } else {
            result = CUDA_ERROR_OPERATING_SYSTEM;
        }
    }
    pthread_mutex_unlock(&machine->lock);
    return result;
}

static CUresult hold(struct shared_object *o, struct machine_object *out) {
    if (!o)
        return CUDA_ERROR_INVALID_HANDLE;
    o->holders[slot / 64] |= (uint64_t)1 << slot % 64;
    *out = o->object;
    return CUDA_SUCCESS;
}

/* Hold memory that another process made; INVALID_HANDLE when it is gone. */
CUresult machine_object_hold(uint64_t id, struct machine_object *out) {
    lock_table(machine);
    machine_reap(machine);
    CUresult result = hold(machine_find(machine, id), out);
    pthread_mutex_unlock(&machine->lock);
    return result;
}

/* Stop holding; the memory goes with its last holder and its last export. */
void machine_object_drop(uint64_t id) {
    if (!machine)
        return;
    int probe = machine_probe();
    lock_table(machine);
    struct shared_object *o = machine_find(machine, id);
    if (o) {
        o->holders[slot / 64] &= ~((uint64_t)1 << slot % 64);
        machine_collect(machine, o, probe);
    }
    pthread_mutex_unlock(&machine->lock);
    close(probe);
}

int machine_object_open(uint64_t id) {
    char name[64];
    snprintf(name, sizeof name, "mem-%llx", (unsigned long long)id);
    return open_in_folder(name, O_RDWR);
}

/* ---- exports ---- */

/* Make a new open file that keeps the memory and can be imported anywhere. */
CUresult machine_export(uint64_t id, int *out) {
    int fd = open_in_folder("nvidiactl", O_RDWR);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    lock_table(machine);
    if (machine->exports_used == MAX_EXPORTS)
        machine_reap(machine);
    for (uint32_t i = 0; i < MAX_EXPORTS; i++) {
        struct shared_export *e = &machine->exports[i];
        if (e->number != 0 && i < machine->exports_used)
            continue;
        uint64_t number = machine->next_export++;
        if (!byte_lock(fd, EXPORT_BYTE + (off_t)number) || lseek(fd, (off_t)number, SEEK_SET) < 0)
            break;
        *e = (struct shared_export){.number = number, .object = id};
        if (i >= machine->exports_used)
            machine->exports_used = i + 1;
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&machine->lock);
    if (result == CUDA_SUCCESS)
        *out = fd;
    else
        close(fd);
    return result;
}

/* Hold the memory that an exported descriptor stands for. */
CUresult machine_import(int fd, struct machine_object *out) {
    struct stat given, ours;
    char path[600];
    snprintf(path, sizeof path, "%s/nvidiactl", state_folder());
    if (fstat(fd, &given) || stat(path, &ours) || given.st_ino != ours.st_ino || given.st_dev != ours.st_dev)
        return CUDA_ERROR_UNKNOWN;
    uint64_t number = (uint64_t)lseek(fd, 0, SEEK_CUR);
    CUresult result = CUDA_ERROR_UNKNOWN;
    lock_table(machine);
    for (uint32_t i = 0; i < machine->exports_used && result != CUDA_SUCCESS; i++)
        if (number && machine->exports[i].number == number)
            result = hold(machine_find(machine, machine->exports[i].object), out);
    pthread_mutex_unlock(&machine->lock);
    return result;
}

/* ---- who uses a GPU: a symbol of the simulation ---- */

static int charged_process(struct machine *m, const struct shared_object *o) {
    int first = -1;
    for (int p = 0; p < MAX_PROCESSES; p++) {
        if (!(o->holders[p / 64] >> p % 64 & 1))
            continue;
        if (m->processes[p].nonce == o->object.creator)
            return p;
        first = first < 0 ? p : first;
    }
    return first;
}

static int report_usage(struct machine *m, int device, unsigned *pids, size_t *bytes, int capacity) {
    size_t used[MAX_PROCESSES + 1] = {0}; /* the last one: memory that only exports keep, reported as pid 0 */
    for (int p = 0; p < MAX_PROCESSES; p++)
        if (m->processes[p].used && m->processes[p].context_on[device])
            used[p] += CONTEXT_COST;
    for (uint32_t i = 0; i < m->objects_used; i++) {
        if (!m->objects[i].object.id || m->objects[i].object.device != device)
            continue;
        int p = charged_process(m, &m->objects[i]);
        used[p < 0 ? MAX_PROCESSES : p] += m->objects[i].object.charged;
    }
    int count = 0;
    for (int p = 0; p <= MAX_PROCESSES; p++)
        if (used[p] && count < capacity) {
            pids[count] = p < MAX_PROCESSES ? m->processes[p].pid : 0;
            bytes[count++] = used[p];
        }
    return count;
}

/* Say which processes use a physical GPU, as NVML does: *count is room in, entries out. Needs no cuInit. */
EXPORT CUresult simcudaDeviceUsage(int device, unsigned *pids, size_t *bytes, int *count);
EXPORT CUresult simcudaDeviceUsage(int device, unsigned *pids, size_t *bytes, int *count) {
    if (!pids || !bytes || !count || device < 0 || device >= MAX_DEVICES)
        return CUDA_ERROR_INVALID_VALUE;
    int folder = machine ? -1 : lock_folder(false);
    struct machine *m = machine ? machine : folder >= 0 ? map_machine(false) : NULL;
    int capacity = *count;
    *count = 0;
    if (m) {
        lock_table(m);
        machine_reap(m);
        *count = report_usage(m, device, pids, bytes, capacity);
        pthread_mutex_unlock(&m->lock);
        if (m != machine)
            munmap(m, sizeof *m);
    }
    unlock_folder(folder);
    return CUDA_SUCCESS;
}
