/* Copies runs of elements between byte buffers: what `_copy_by_numpy` of row_copies.py does, in a tenth of the time.

   Where runs begin, and how long they are, is said by other processes, and may lie in memory that these still write. So
   every run is checked before the first one is copied; and each again, by the numbers that it is copied by. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LONG (256 << 10) /* bytes from which on other threads run meanwhile: handing over costs more than a short copy */

typedef struct {
    const char *source;
    char *target;
    const volatile int64_t *begin, *at, *sizes; /* of each run, in elements */
    int64_t in_source, in_target, width;        /* elements that the buffers have, and bytes of one */
    Py_ssize_t count;
} Runs;

typedef struct {
    int64_t begin, at, size;
} Run;

static inline Run read_run(const Runs *runs, Py_ssize_t i)
{
    Run run = {runs->begin[i], runs->at[i], runs->sizes[i]};
    return run;
}

/* Return whether a run lies within both buffers, whatever its numbers are: nothing here overflows. */
static inline int is_within(const Runs *runs, Run run)
{
    return run.begin >= 0 && run.at >= 0 && run.size >= 0 && run.begin <= runs->in_source &&
           run.at <= runs->in_target && run.size <= runs->in_source - run.begin &&
           run.size <= runs->in_target - run.at;
}

/* Return the first run that does not lie within both buffers, or -1. `bytes` becomes that of all, or LONG if more. */
static Py_ssize_t find_outside(const Runs *runs, int64_t *bytes)
{
    *bytes = 0;
    for (Py_ssize_t i = 0; i < runs->count; i++) {
        Run run = read_run(runs, i);
        if (!is_within(runs, run))
            return i;
        if (*bytes < LONG) /* as both are below 2^63 / 2, or no buffer would have them */
            *bytes += run.size * runs->width;
    }
    return -1;
}

/* Copy the runs, those that lie side by side at both ends at once. Return the run before which it stopped, or -1. */
static Py_ssize_t copy_all(const Runs *runs)
{
    for (Py_ssize_t i = 0; i < runs->count;) {
        Py_ssize_t first = i;
        Run run = read_run(runs, i++);
        if (!is_within(runs, run))
            return first;
        while (i < runs->count) {
            Run next = read_run(runs, i);
            if (next.begin != run.begin + run.size || next.at != run.at + run.size || !is_within(runs, next))
                break;
            run.size += next.size;
            i++;
        }
        /* one buffer may be part of the other */
        memmove(runs->target + run.at * runs->width, runs->source + run.begin * runs->width,
                (size_t)(run.size * runs->width));
    }
    return -1;
}

static Py_ssize_t check_and_copy(const Runs *runs)
{
    int64_t bytes;
    Py_ssize_t outside = find_outside(runs, &bytes);
    if (outside >= 0)
        return outside;
    if (bytes < LONG)
        return copy_all(runs);
    Py_BEGIN_ALLOW_THREADS
    outside = copy_all(runs);
    Py_END_ALLOW_THREADS
    return outside;
}

/* Get an array of int64, side by side and aligned. */
static int get_numbers(PyObject *array, Py_buffer *view)
{
    if (PyObject_GetBuffer(array, view, PyBUF_ND | PyBUF_FORMAT) < 0)
        return -1;
    if (view->ndim == 1 && view->itemsize == sizeof(int64_t) && view->format && view->format[0] && !view->format[1] &&
        strchr("lq", view->format[0]) && (uintptr_t)view->buf % sizeof(int64_t) == 0)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "runs are said by aligned arrays [runs] of int64");
    return -1;
}

/* Get the buffers: source, target, then the numbers. Return how many there are: 5, or fewer with an exception set. */
static int get_buffers(PyObject *const *given, Py_buffer *views)
{
    if (PyObject_GetBuffer(given[0], &views[0], PyBUF_SIMPLE) < 0)
        return 0;
    if (PyObject_GetBuffer(given[1], &views[1], PyBUF_WRITABLE) < 0)
        return 1;
    for (int i = 2; i < 5; i++)
        if (get_numbers(given[i], &views[i]) < 0)
            return i;
    return 5;
}

static PyObject *copy_runs(PyObject *module, PyObject *arguments)
{
    PyObject *given[5], *result = NULL;
    Py_ssize_t width;
    Py_buffer views[5];
    if (!PyArg_ParseTuple(arguments, "OOOOOn", &given[0], &given[1], &given[2], &given[3], &given[4], &width))
        return NULL;
    int got = get_buffers(given, views);
    if (got == 5 && width > 0 && views[2].len == views[3].len && views[2].len == views[4].len) {
        Runs runs = {views[0].buf, views[1].buf, views[2].buf, views[3].buf, views[4].buf,
                     views[0].len / width, views[1].len / width, width, views[2].len / (Py_ssize_t)sizeof(int64_t)};
        result = PyLong_FromSsize_t(check_and_copy(&runs));
    } else if (got == 5) {
        PyErr_SetString(PyExc_ValueError, "an element has a byte or more, and a run one number in each array");
    }
    while (got)
        PyBuffer_Release(&views[--got]);
    return result;
}

static PyMethodDef functions[] = {
    {"copy_runs", copy_runs, METH_VARARGS,
     "copy_runs(source, target, begin, at, sizes, width, /)\n--\n\n"
     "Copy `sizes[i]` elements of `width` bytes from element `begin[i]` of `source` to element `at[i]` of `target`.\n"
     "Return -1, or the first run that is not within both: then nothing was copied."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "compiled_copies", "Copies runs of elements between byte buffers.", 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_compiled_copies(void)
{
    return PyModuleDef_Init(&definition);
}
