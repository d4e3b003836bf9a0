/* SPDX-License-Identifier: MIT */
#include "cli/progress.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

void progress_init(progress *p, const train_run *run)
{
    const train_settings *s = &run->s;
    *p = (progress){ .quiet = s->quiet, .terminal = !s->quiet && !s->no_progress && isatty(STDOUT_FILENO), .steps = s->steps, .first = run->first_step,
                     .every = s->log_every, .started_s = cli_clock() };
    if (s->stop_after > 0 && s->stop_after < s->steps) p->steps = s->stop_after;
}

static void flush(progress *p)
{
    if (fflush(stdout) != 0 || ferror(stdout)) p->broken = true;
}

static int columns(void)
{
    struct winsize w;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 20 ? w.ws_col : 200;
}

static void time_text(double s, char *to, size_t size)
{
    long t = (long)(s + 0.5);
    if (t >= 3600) snprintf(to, size, "%ld:%02ld:%02ld", t / 3600, t / 60 % 60, t % 60);
    else snprintf(to, size, "%ld:%02ld", t / 60, t % 60);
}

void progress_step(progress *p, const step_record *r, double tokens_per_s)
{
    if (p->quiet) return;
    if (!p->terminal && r->step % p->every != 0 && r->step != p->steps && r->step != p->first + 1) return;
    double now = cli_clock(), spent = now - p->started_s, done = (double)(r->step - p->first);
    if (p->terminal && p->line_open && now - p->shown_s < 0.05 && r->step != p->steps) return; /* nobody reads faster */
    p->shown_s = now;
    char left[32], line[200];
    time_text(done > 0 ? spent / done * (double)(p->steps - r->step) : 0, left, sizeof(left));
    snprintf(line, sizeof(line), "step %lld/%lld  loss %.4f  norm %.3f  lr %.2e  %.0f tok/s  %s left", (long long)r->step, (long long)p->steps, r->loss, r->grad_norm, r->lr,
             tokens_per_s, left);
    if (p->terminal) printf("\r%.*s\033[K", columns() - 1, line); /* one that wraps cannot be gone back over */
    else printf("%s\n", line);
    p->line_open = p->terminal;
    flush(p);
}

void progress_say(progress *p, const char *fmt, ...)
{
    if (p->quiet) return;
    progress_end(p);
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    flush(p);
}

void progress_end(progress *p)
{
    if (p->line_open) putchar('\n');
    p->line_open = false;
    flush(p);
}
