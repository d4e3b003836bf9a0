/* SPDX-License-Identifier: MIT
 *
 * The folder of a run: run.json (all settings), log.jsonl (an object a step), checkpoints/, and the model at the end. */
#ifndef FSDP_CLI_RUN_FOLDER_H
#define FSDP_CLI_RUN_FOLDER_H

#include "cli/train_settings.h"

/* One step, as log.jsonl has it. */
typedef struct step_record {
    int64_t step; /* how many steps are done: 1 after the first */
    double loss, grad_norm, lr;
    double loss_scale; /* with which its gradients were made; 0: there is none */
    bool skipped;      /* they were not finite */
    int64_t tokens; /* of the run so far */
    double step_ms, wall_s;
    double forward_ms, backward_ms, optimizer_ms; /* of rank 0; waits, copies and reductions are within them */
    double wait_ms, copy_ms, reduce_ms;
    fsdp_comm_stats collectives; /* of this step and rank 0 */
    const double *private_mib, *shared_mib; /* [ranks] */
    int ranks;
    bool evaluated;
    double val_loss;
    int64_t val_tokens;
} step_record;

/* In the parent, before ranks start: makes the folder, or refuses one that holds another run; on resuming cuts the log back
 * to the checkpoint's step. Prints what is wrong; 0: well. */
int run_folder_open(const train_run *run);

/* On rank 0. */
fsdp_status run_folder_write_settings(const train_run *run, int64_t parameters);
fsdp_status run_folder_log(const train_run *run, FILE *log, const step_record *r);
fsdp_status run_folder_open_log(const train_run *run, FILE **out);

/* What a checkpoint of the run keeps of its settings: JSON text, to be freed with free(). NULL: no memory. */
char *run_settings_text(const train_run *run);

#endif
