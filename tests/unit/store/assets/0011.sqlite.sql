BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0011');
CREATE TABLE audit (
	id INTEGER NOT NULL, 
	at VARCHAR NOT NULL, 
	token VARCHAR NOT NULL, 
	action VARCHAR NOT NULL, 
	search_id VARCHAR NOT NULL, 
	CONSTRAINT pk_audit PRIMARY KEY (id), 
	CONSTRAINT fk_audit_search_id FOREIGN KEY(search_id) REFERENCES searches (search_id)
);
INSERT INTO "audit" VALUES(1,'2026-11-29T20:30:02.500282+00:00','ann','cancel','cancelled');
CREATE TABLE contexts (
	hardware_key VARCHAR NOT NULL, 
	stack_key VARCHAR NOT NULL, 
	workload_key VARCHAR NOT NULL, 
	version BIGINT NOT NULL, 
	last_trial_id BIGINT NOT NULL, 
	CONSTRAINT pk_contexts PRIMARY KEY (hardware_key, stack_key, workload_key)
);
INSERT INTO "contexts" VALUES('236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538',13,14);
INSERT INTO "contexts" VALUES('236d8dc0fdc37d88','7d6bbe71a63612fc','aaee8e4c1eab90ea',1,10);
CREATE TABLE estimates (
	"key" VARCHAR NOT NULL, 
	estimate JSON NOT NULL, 
	recorded_at VARCHAR NOT NULL, 
	CONSTRAINT pk_estimates PRIMARY KEY ("key")
);
INSERT INTO "estimates" VALUES('0000000000000000000000000000000000000000000000000000000000000000','{"device_bytes":22548578304}','2026-11-29T20:30:02.459932+00:00');
CREATE TABLE events (
	search_id VARCHAR NOT NULL, 
	seq INTEGER NOT NULL, 
	kind VARCHAR NOT NULL, 
	at VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (search_id, seq), 
	CONSTRAINT fk_events_search_id FOREIGN KEY(search_id) REFERENCES searches (search_id)
);
INSERT INTO "events" VALUES('running',1,'running','2026-11-29T20:30:02.210681+00:00','{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO "events" VALUES('succeeded',1,'running','2026-11-29T20:30:02.234768+00:00','{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO "events" VALUES('cancelled',1,'running','2026-11-29T20:30:02.253917+00:00','{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO "events" VALUES('failed',1,'running','2026-11-29T20:30:02.262681+00:00','{"epoch":1,"driver":"elsewhere:1:0"}');
INSERT INTO "events" VALUES('succeeded',2,'trial','2026-11-29T20:30:02.297090+00:00','{"trial_id":1,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":8},"outcome":"fits","device_bytes":8589934592,"tokens_per_second":900.0,"seconds":12.25}');
INSERT INTO "events" VALUES('succeeded',3,'trial','2026-11-29T20:30:02.316273+00:00','{"trial_id":2,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16},"outcome":"fits","device_bytes":17179869184,"tokens_per_second":1000.5,"seconds":12.25}');
INSERT INTO "events" VALUES('succeeded',4,'trial','2026-11-29T20:30:02.325732+00:00','{"trial_id":3,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16},"outcome":"fits","device_bytes":17179869184,"tokens_per_second":1001.5,"seconds":12.25}');
INSERT INTO "events" VALUES('succeeded',5,'trial','2026-11-29T20:30:02.330868+00:00','{"trial_id":4,"config":{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":32},"outcome":"fits","device_bytes":34359738368,"tokens_per_second":700.0,"seconds":12.25}');
INSERT INTO "events" VALUES('cancelled',2,'cancelled','2026-11-29T20:30:02.494001+00:00','{}');
INSERT INTO "events" VALUES('succeeded',6,'succeeded','2026-11-29T20:30:02.510082+00:00','{"trials":1}');
INSERT INTO "events" VALUES('failed',2,'failed','2026-11-29T20:30:02.524401+00:00','{}');
CREATE TABLE hardware (
	digest VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_hardware PRIMARY KEY (digest)
);
INSERT INTO "hardware" VALUES('034bdad13f786aec','236d8dc0fdc37d88','h100-80g','{"name":"h100-80g","kind":"cuda","device_name":"NVIDIA H100 80GB HBM3","memory_bytes":85899345920,"count":1,"cores":0,"host_memory_bytes":0,"capability":"9.0","bf16":true,"peak_flops":989400000000000.0,"instructions":null,"power_limit_watts":null,"mig_profile":null}');
CREATE TABLE idempotency_keys (
	token VARCHAR NOT NULL, 
	"key" VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	search_id VARCHAR NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (token, "key"), 
	CONSTRAINT fk_idempotency_keys_search_id FOREIGN KEY(search_id) REFERENCES searches (search_id)
);
CREATE TABLE probes (
	hardware_key VARCHAR NOT NULL, 
	stack_key VARCHAR NOT NULL, 
	shapes_key VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	recorded_at VARCHAR NOT NULL, 
	CONSTRAINT pk_probes PRIMARY KEY (hardware_key, stack_key, shapes_key)
);
INSERT INTO "probes" VALUES('236d8dc0fdc37d88','7d6bbe71a63612fc','0000000000000000','{"hardware":{"name":"h100-80g","kind":"cuda","device_name":"NVIDIA H100 80GB HBM3","memory_bytes":85899345920,"count":1,"cores":0,"host_memory_bytes":0,"capability":"9.0","bf16":true,"peak_flops":989400000000000.0,"instructions":null,"power_limit_watts":null,"mig_profile":null},"stack":{"python":"3.11.9","torch":"2.13.0","transformers":"5.23.0","peft":"0.21.2","bitsandbytes":null,"deepspeed":null,"flash_attn":null,"liger_kernel":null,"mamba_ssm":null,"causal_conv1d":null,"flash_linear_attention":null,"cuda":"13.0","driver":null},"model":"llama-3.1-8b","shapes_key":"0000000000000000","parts":[{"name":"products in fp32","seconds":0.30000000000000004,"seconds_per":{"product/fp32/nt":1e-11},"figures":{},"failure":null},{"name":"attention in fp16","seconds":1.0,"seconds_per":{},"figures":{},"failure":"RuntimeError: not implemented"}],"steps":[{"config":{"method":"lora"},"layers":2,"seconds":0.6,"work":null}],"seconds":9.5,"recorded_at":"2026-01-01T00:00:00+00:00","device_state":null,"version":6}','2026-01-01T00:00:00+00:00');
CREATE TABLE searches (
	search_id VARCHAR NOT NULL, 
	hardware_digest VARCHAR, 
	stack_key VARCHAR, 
	workload_key VARCHAR NOT NULL, 
	state VARCHAR NOT NULL, 
	started_at VARCHAR NOT NULL, 
	ended_at VARCHAR, 
	request JSON NOT NULL, 
	result JSON, digest VARCHAR, campaign_id VARCHAR, hardware_name VARCHAR, lease_owner VARCHAR, lease_expires_at DOUBLE, lease_epoch INTEGER DEFAULT '0' NOT NULL, spent_seconds DOUBLE DEFAULT '0' NOT NULL, spent_trials INTEGER DEFAULT '0' NOT NULL, last_seq INTEGER DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_searches PRIMARY KEY (search_id), 
	CONSTRAINT fk_searches_hardware_digest FOREIGN KEY(hardware_digest) REFERENCES hardware (digest), 
	CONSTRAINT fk_searches_stack_key FOREIGN KEY(stack_key) REFERENCES stacks ("key"), 
	CONSTRAINT fk_searches_workload_key FOREIGN KEY(workload_key) REFERENCES workloads ("key")
);
INSERT INTO "searches" VALUES('running','034bdad13f786aec','7d6bbe71a63612fc','f159e706383d3538','running','2026-11-29T20:30:02.206546+00:00',NULL,'{"space":"one-gpu"}',NULL,'running',NULL,NULL,'elsewhere:1:0',1.7959842322099926472e+09,1,0.0,0,1);
INSERT INTO "searches" VALUES('succeeded','034bdad13f786aec','7d6bbe71a63612fc','f159e706383d3538','succeeded','2026-11-29T20:30:02.233589+00:00','2026-11-29T20:30:02.507879+00:00','{"space":"one-gpu"}','{"trials":1}','succeeded',NULL,NULL,NULL,NULL,1,0.0,4,6);
INSERT INTO "searches" VALUES('cancelled','034bdad13f786aec','7d6bbe71a63612fc','f159e706383d3538','cancelled','2026-11-29T20:30:02.252799+00:00','2026-11-29T20:30:02.492761+00:00','{"space":"one-gpu"}',NULL,'cancelled',NULL,NULL,'elsewhere:1:0',1.79598423225300192831e+09,1,0.0,0,2);
INSERT INTO "searches" VALUES('failed','034bdad13f786aec','7d6bbe71a63612fc','f159e706383d3538','failed','2026-11-29T20:30:02.261411+00:00','2026-11-29T20:30:02.523296+00:00','{"space":"one-gpu"}',NULL,'failed',NULL,NULL,NULL,NULL,1,0.0,0,2);
CREATE TABLE stacks (
	"key" VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_stacks PRIMARY KEY ("key")
);
INSERT INTO "stacks" VALUES('7d6bbe71a63612fc','{"python":"3.11.9","torch":"2.13.0","transformers":"5.23.0","peft":"0.21.2","bitsandbytes":null,"deepspeed":null,"flash_attn":null,"liger_kernel":null,"mamba_ssm":null,"causal_conv1d":null,"flash_linear_attention":null,"cuda":"13.0","driver":null}');
CREATE TABLE tokens (
	name VARCHAR NOT NULL, 
	scope VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	created_at VARCHAR NOT NULL, 
	revoked_at VARCHAR, 
	CONSTRAINT pk_tokens PRIMARY KEY (name)
);
INSERT INTO "tokens" VALUES('ann','run','c11606a28d0a6b7c2452a64246aae2061cb089a5d02bb2742b7ccc4ce7d0a648','2026-11-29T20:30:02.472999+00:00',NULL);
INSERT INTO "tokens" VALUES('bob','read','a9ce3fd784dd23b54e799a7bcda8f5c61cbc9da10f307926be4f397523cbd47a','2026-11-29T20:30:02.480794+00:00','2026-11-29T20:30:02.484549+00:00');
CREATE TABLE trials (
	id INTEGER NOT NULL, 
	hardware_digest VARCHAR NOT NULL, 
	hardware_key VARCHAR NOT NULL, 
	stack_key VARCHAR NOT NULL, 
	workload_key VARCHAR NOT NULL, 
	config_key VARCHAR NOT NULL, 
	memory_limit_bytes BIGINT NOT NULL, 
	attempt INTEGER NOT NULL, 
	search_id VARCHAR, 
	family VARCHAR NOT NULL, 
	outcome VARCHAR NOT NULL, 
	device_bytes BIGINT, 
	tokens_per_second DOUBLE, 
	seconds DOUBLE NOT NULL, 
	recorded_at VARCHAR NOT NULL, 
	config JSON NOT NULL, 
	evidence JSON NOT NULL, stopped_early BOOLEAN DEFAULT 0 NOT NULL, prediction JSON, device_state JSON, suspect BOOLEAN DEFAULT 0 NOT NULL, uid VARCHAR, node VARCHAR, autofit_version VARCHAR, search_epoch INTEGER, driver VARCHAR, 
	CONSTRAINT pk_trials PRIMARY KEY (id), 
	CONSTRAINT uq_trials_attempt UNIQUE (hardware_key, stack_key, workload_key, config_key, memory_limit_bytes, attempt), 
	CONSTRAINT fk_trials_search_id FOREIGN KEY(search_id) REFERENCES searches (search_id), 
	CONSTRAINT fk_trials_hardware_digest FOREIGN KEY(hardware_digest) REFERENCES hardware (digest), 
	CONSTRAINT fk_trials_stack_key FOREIGN KEY(stack_key) REFERENCES stacks ("key"), 
	CONSTRAINT fk_trials_workload_key FOREIGN KEY(workload_key) REFERENCES workloads ("key")
);
INSERT INTO "trials" VALUES(1,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','539f52a91c41263a',85899345920,1,'succeeded','method=lora,rank=8,precision=bf16-mixed','fits',8589934592,900.0,12.25,'2026-01-01T00:00:00Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":8}','{"outcome":"fits","measurement":{"tokens_per_second":900.0,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":8589934589,"peak_reserved_bytes":8589934590,"device_bytes":8589934592,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,NULL,NULL,0,'4a294fe8a939458bb4d294d3b24e0eb1',NULL,'0.1.0',1,NULL);
INSERT INTO "trials" VALUES(2,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','1adc3de57783a4ff',85899345920,1,'succeeded','method=lora,rank=16,precision=bf16-mixed','fits',17179869184,1000.5,12.25,'2026-01-01T00:00:01Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}','{"outcome":"fits","measurement":{"tokens_per_second":1000.5,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":17179869181,"peak_reserved_bytes":17179869182,"device_bytes":17179869184,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,NULL,NULL,0,'dc429c57608d4a899cd89b48618ee238',NULL,'0.1.0',1,NULL);
INSERT INTO "trials" VALUES(3,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','1adc3de57783a4ff',85899345920,2,'succeeded','method=lora,rank=16,precision=bf16-mixed','fits',17179869184,1001.5,12.25,'2026-01-01T00:00:02Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}','{"outcome":"fits","measurement":{"tokens_per_second":1001.5,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":17179869181,"peak_reserved_bytes":17179869182,"device_bytes":17179869184,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,NULL,NULL,0,'53ced40adedb48f7a5de17876b4f304d',NULL,'0.1.0',1,NULL);
INSERT INTO "trials" VALUES(4,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','549b7cb7e3c54cd4',85899345920,1,'succeeded','method=lora,rank=32,precision=bf16-mixed','fits',34359738368,700.0,12.25,'2026-01-01T00:00:03Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":32}','{"outcome":"fits","measurement":{"tokens_per_second":700.0,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":34359738365,"peak_reserved_bytes":34359738366,"device_bytes":34359738368,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,NULL,NULL,0,'5b0f65f049ad41e481af8875c7eda492',NULL,'0.1.0',1,NULL);
INSERT INTO "trials" VALUES(5,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','1adc3de57783a4ff',85899345920,3,NULL,'method=lora,rank=16,precision=bf16-mixed','out_of_memory',NULL,NULL,12.25,'2026-01-01T00:00:04Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}','{"outcome":"out_of_memory","reason":"tried to allocate 2 GiB","phase":"backward","requested_bytes":2147483648,"signal":null,"host":false}',0,NULL,NULL,0,'7530d5753d074b7daa5f72ccd06da58c',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(6,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','a5984c2a3659e53d',85899345920,1,NULL,'method=lora,rank=16,precision=bf16-mixed','timed_out',NULL,NULL,12.25,'2026-01-01T00:00:05Z','{"compile":false,"method":"lora","micro_batch":2,"precision":"bf16-mixed","rank":16}','{"outcome":"timed_out","reason":"no end within 60 s","deadline_seconds":60.0,"phase":"forward","phases_entered":0,"least_step_seconds":null,"is_proven":false,"peak_bytes":null,"timed_seconds":[]}',0,NULL,NULL,0,'51d4860d41b34e00a65a6da87d53e8df',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(7,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','8447f001bc709bfd',85899345920,1,NULL,'method=lora,rank=16,precision=bf16-mixed','crashed',NULL,NULL,12.25,'2026-01-01T00:00:06Z','{"compile":false,"method":"lora","micro_batch":4,"precision":"bf16-mixed","rank":16}','{"outcome":"crashed","reason":"SIGSEGV","phase":null,"signal":"SIGSEGV","exit_code":-11,"stderr_tail":"na\u00efve \u0000 \u2603\n","transient":false,"worker_lost":false}',0,NULL,NULL,0,'30445f82596a44d595a74dbddadf30ea',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(8,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','9d532e6c2ea54332',85899345920,1,NULL,'method=lora,rank=16,precision=bf16-mixed','diverged',NULL,NULL,12.25,'2026-01-01T00:00:07Z','{"compile":false,"method":"lora","micro_batch":8,"precision":"bf16-mixed","rank":16}','{"outcome":"diverged","reason":"loss is not finite","losses":[11.5,null],"reference_loss":11.5}',0,NULL,NULL,0,'752b4ae832124578b3b1e6f2d27e0d2f',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(9,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','cd729b0e028456cc',85899345920,1,NULL,'method=lora,rank=16,precision=bf16-mixed','unsupported',NULL,NULL,12.25,'2026-01-01T00:00:08Z','{"compile":false,"method":"lora","micro_batch":16,"precision":"bf16-mixed","rank":16}','{"outcome":"unsupported","reason":"flash attention needs compute capability 8.0"}',0,NULL,NULL,0,'152420f7059b4828a062ed18df9c62f1',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(10,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','aaee8e4c1eab90ea','1adc3de57783a4ff',25769803776,1,NULL,'method=lora,rank=16,precision=bf16-mixed','fits',21474836480,1.23456789012345666376e+03,12.25,'2026-01-01T00:00:09Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}','{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,NULL,NULL,0,'6cf1455a8e0b49deb32ac693eaaa5a4e',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(11,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','1adc3de57783a4ff',85899345920,4,NULL,'method=lora,rank=16,precision=bf16-mixed','fits',21474836480,1.23456789012345666376e+03,12.25,'2026-01-01T00:00:10Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}','{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,'{"peak_allocated_bytes":20401094657,"device_bytes":22548578304,"step_seconds":0.30000000000000004,"calibrated_on":5,"relative_error":null,"work":null,"memory_error":0.0,"peak_reserved_bytes":21474836487,"micro_step_seconds":null}',NULL,0,'2012c48d50b445258906c09bd6ce9357',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(12,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','1adc3de57783a4ff',85899345920,5,NULL,'method=lora,rank=16,precision=bf16-mixed','out_of_memory',NULL,NULL,12.25,'2026-01-01T00:00:11Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":16}','{"outcome":"out_of_memory","reason":"tried to allocate 2 GiB","phase":"backward","requested_bytes":2147483648,"signal":null,"host":false}',0,'{"peak_allocated_bytes":20401094657,"device_bytes":22548578304,"step_seconds":0.30000000000000004,"calibrated_on":5,"relative_error":null,"work":null,"memory_error":0.0,"peak_reserved_bytes":21474836487,"micro_step_seconds":null}',NULL,0,'e37bc80eeb744658946eaf9b3e372866',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(13,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','8811b72b3962bdd1',85899345920,1,NULL,'method=lora,rank=64,precision=bf16-mixed','fits',21474836480,1.23456789012345666376e+03,12.25,'2026-01-01T00:00:12Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":64}','{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,NULL,'{"seconds":3.25,"processor":null,"cards":[{"uuid":"GPU-a","sm_clock_mhz":null,"sm_clock_max_mhz":null,"power_limit_watts":null,"power_limit_default_watts":null,"throttle_mask":null,"others_bytes":null,"others_share":0.45,"memory_errors":null}]}',1,'17efc0895ff84e0d83289a3f5097b88b',NULL,'0.1.0',NULL,NULL);
INSERT INTO "trials" VALUES(14,'034bdad13f786aec','236d8dc0fdc37d88','7d6bbe71a63612fc','f159e706383d3538','8811b72b3962bdd1',85899345920,2,NULL,'method=lora,rank=64,precision=bf16-mixed','fits',21474836480,1.23456789012345666376e+03,12.25,'2026-01-01T00:00:13Z','{"compile":false,"method":"lora","micro_batch":1,"precision":"bf16-mixed","rank":64}','{"outcome":"fits","measurement":{"tokens_per_second":1234.5678901234567,"step_seconds":{"median":0.1,"p95":0.11,"relative_spread":0.02},"mfu":0.41,"peak_allocated_bytes":21474836477,"peak_reserved_bytes":21474836478,"device_bytes":21474836480,"host_peak_bytes":2147483648,"host_baseline_bytes":1073741824,"phase_peaks":{"forward":1,"backward":2,"optimizer":3},"losses":[11.5,11.25,1e-07],"reference_loss":11.5,"steps":7,"setup_seconds":2.5,"overhead_seconds":0.25,"gradient_norms":[],"plain_gradient_norm":null,"setup_peak_bytes":0,"leak_bytes_per_step":0,"expandable_segments":false,"stopped_early":false,"ranks":[],"loss":{"first":11.5,"last":1e-07}}}',0,NULL,NULL,0,'7e4f4f1e19624749bf6293881cb7a4da',NULL,'0.1.0',NULL,NULL);
CREATE TABLE workloads (
	"key" VARCHAR NOT NULL, 
	model VARCHAR NOT NULL, 
	body JSON NOT NULL, 
	CONSTRAINT pk_workloads PRIMARY KEY ("key")
);
INSERT INTO "workloads" VALUES('f159e706383d3538','llama-3.1-8b','{"model":"llama-3.1-8b","seq_len":2048,"global_batch":64,"lora_dropout":0.05,"devices":1,"seed":0,"model_digest":"0123456789abcdef"}');
INSERT INTO "workloads" VALUES('aaee8e4c1eab90ea','llama-3.1-8b','{"model":"llama-3.1-8b","seq_len":4096,"global_batch":64,"lora_dropout":0.05,"devices":1,"seed":0,"model_digest":"0123456789abcdef"}');
CREATE INDEX ix_hardware_key ON hardware ("key");
CREATE INDEX ix_workloads_model ON workloads (model);
CREATE INDEX ix_trials_search_id ON trials (search_id);
CREATE INDEX ix_trials_frontier ON trials (workload_key, hardware_key, stack_key, outcome, stopped_early, family, device_bytes, tokens_per_second, id);
CREATE UNIQUE INDEX ix_trials_uid ON trials (uid);
CREATE INDEX ix_trials_hardware ON trials (hardware_key, id);
CREATE UNIQUE INDEX uq_searches_digest ON searches (digest) WHERE state IN ('queued', 'running');
CREATE INDEX ix_searches_state ON searches (state, started_at);
CREATE UNIQUE INDEX uq_tokens_digest ON tokens (digest);
CREATE INDEX ix_audit_search_id ON audit (search_id);
COMMIT;
